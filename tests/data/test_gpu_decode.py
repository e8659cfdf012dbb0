"""Decoding on the GPU: which images go there, what becomes of the others, and that nothing depends on the way taken.

A decoder on the CPU stands in for the GPU's; the tests with the real one need a GPU.
"""

import io
import itertools
import threading

import numpy as np
import PIL.Image
import pytest
import torch

from stop_mim.data import gpu_decode
from stop_mim.data import loader as loader_module
from stop_mim.data.augment import Augment, AugmentConfig
from stop_mim.data.bad_images import BadImages
from stop_mim.data.crops import Box, Part, crop_box, crop_chances, cut
from stop_mim.data.gpu_decode import are_jpegs, crop_each, decode_or_none, decoder_obstacle, gpu_decoder
from stop_mim.data.images import decode_image
from stop_mim.data.loader import GpuStreamingLoader, StreamingLoader, choices_of, open_loader
from stop_mim.data.order import BatchOrder
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

CPU = torch.device("cpu")
RICH = AugmentConfig(flip_probability=0.5, grey_probability=0.2)
needs_nvjpeg = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(decoder_obstacle(torch.device("cuda", 0))),
    reason="no GPU on which torchvision decodes JPEGs",
)


class StandIn:
    """Decodes as the GPU's decoder would, all or nothing, and remembers what it was given."""

    def __init__(self, refused=()):
        self.refused, self.calls = refused, []

    def __call__(self, encoded):
        files = [bytes(file.numpy()) for file in encoded]
        self.calls.append(files)
        if any(file in self.refused for file in files):
            raise RuntimeError("nvjpegDecodeBatched failed")
        return [decode_image(file, "a") for file in files]

    @property
    def decoded(self):
        return {file for files in self.calls if not set(files) & set(self.refused) for file in files}


def picture(number, height, width):
    coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.BICUBIC)


def write(path, image, **options):
    image.save(path, quality=95, **options)
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path):
    """Twenty-four good JPEGs of many sizes."""
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(24):
        write(folder / f"{number:02d}.jpg", picture(number, 30 + number % 7, 50 - number % 5))
    return folder


def gpu_loader(folder, decoder, config=RICH, size=(16, 16), workers=2, bad_images=None):
    source = open_source(str(folder))
    bad_images = BadImages(source.name, len(source)) if bad_images is None else bad_images
    return GpuStreamingLoader(source, Augment(config, size), CPU, bad_images, 0, decoder, workers=workers)


def cpu_loader(folder, config=RICH, size=(16, 16)):
    source = open_source(str(folder))
    bad_images = BadImages(source.name, len(source))
    return StreamingLoader(source, Augment(config, size), CPU, bad_images, 0, workers=0)


def take(loader, count, first=0, batch_size=8, crops=False):
    order = BatchOrder(loader.n_images, batch_size)
    return list(itertools.islice((loader.crops if crops else loader.batches)(order, first), count))


def assert_close(one, other):
    assert one.shape == other.shape
    # The two ways of resizing round differently.
    assert (one.int() - other.int()).abs().max() <= 1


def test_the_crops_are_those_of_the_cpu(folder):
    decoder = StandIn()
    ours, theirs = take(gpu_loader(folder, decoder), 6, crops=True), take(cpu_loader(folder), 6, crops=True)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert decoder.decoded == {path.read_bytes() for path in folder.iterdir()}


def test_any_batch_can_be_the_first_with_any_number_of_threads(folder):
    batches = take(gpu_loader(folder, StandIn()), 8)
    for first, workers in ((0, 0), (1, 1), (3, 4), (7, 2)):
        assert torch.equal(take(gpu_loader(folder, StandIn(), workers=workers), 1, first)[0], batches[first])
    assert len({batch.sum().item() for batch in batches}) == 8


def test_what_the_gpu_cannot_take_is_decoded_on_the_cpu(folder):
    upside_down = PIL.Image.Exif()
    upside_down[0x0112] = 3
    others = {
        write(folder / "00.jpg", picture(0, 30, 40).convert("CMYK")),
        write(folder / "01.jpg", picture(1, 30, 40), exif=upside_down),
        write(folder / "02.png", picture(2, 30, 40)),
        write(folder / "03.webp", picture(3, 30, 40)),
        write(folder / "04.jpg", picture(4, 30, 40)) + b"more behind the end",
    }
    (folder / "02.jpg").unlink()
    (folder / "03.jpg").unlink()
    (folder / "04.jpg").write_bytes(next(file for file in others if file.endswith(b"the end")))
    decoder = StandIn()
    ours, theirs = take(gpu_loader(folder, decoder), 3, crops=True), take(cpu_loader(folder), 3, crops=True)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert decoder.decoded == {path.read_bytes() for path in folder.iterdir()} - others


def test_large_images_are_decoded_on_the_cpu(folder, monkeypatch):
    monkeypatch.setattr(gpu_decode, "LARGEST_PIXELS", 30 * 50)
    decoder = StandIn()
    ours, theirs = take(gpu_loader(folder, decoder), 3, crops=True), take(cpu_loader(folder), 3, crops=True)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    sizes = [PIL.Image.open(io.BytesIO(file)).size for file in decoder.decoded]
    assert 0 < len(sizes) < 24
    assert max(width * height for width, height in sizes) <= 30 * 50


def test_a_file_that_fails_does_not_fail_its_batch(folder):
    files = [path.read_bytes() for path in sorted(folder.iterdir())]
    decoder = StandIn(refused=(files[3], files[20]))
    ours, theirs = take(gpu_loader(folder, decoder), 3, crops=True), take(cpu_loader(folder), 3, crops=True)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert decoder.decoded == set(files) - set(decoder.refused)


def test_an_image_of_another_size_than_its_header_says_is_not_believed(folder):
    def shifted(encoded):
        return [torch.cat([image, image], dim=1) for image in StandIn()(encoded)]

    for one, other in zip(
        take(gpu_loader(folder, shifted), 3, crops=True), take(cpu_loader(folder), 3, crops=True), strict=True
    ):
        assert_close(one, other)


def test_bad_images_are_replaced_by_the_next_good_one_and_told(tmp_path):
    whole = tmp_path / "set"
    whole.mkdir()
    for number in range(100):
        write(whole / f"{number:02d}.jpg", picture(number, 20, 20))
    path = whole / "07.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    bad_images = BadImages("set", 100, tmp_path / "bad.txt")
    loader = gpu_loader(whole, StandIn(), AugmentConfig((1.0, 1.0), (1.0, 1.0)), (20, 20), bad_images=bad_images)
    batches = take(loader, 10, batch_size=10, crops=True)
    indices = torch.cat([BatchOrder(100, 10).indices(batch) for batch in range(10)]).tolist()
    images = torch.cat(batches)
    assert_close(images[indices.index(7)], images[indices.index(8)])
    assert (tmp_path / "bad.txt").read_text().startswith(str(path))
    assert len(bad_images) == 1


def test_pieces_bound_the_memory_and_change_nothing(folder, monkeypatch):
    expected = take(gpu_loader(folder, StandIn()), 3, crops=True)
    monkeypatch.setattr(gpu_decode, "PIXELS_AT_ONCE", 3 * 40 * 50)
    decoder = StandIn()
    for one, other in zip(take(gpu_loader(folder, decoder), 3, crops=True), expected, strict=True):
        assert_close(one, other)
    assert max(len(files) for files in decoder.calls) in (3, 4, 5)


def test_an_error_of_a_thread_reaches_the_caller(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(b"no image")
    with pytest.raises(InputError, match="None of the 4 images"):
        take(gpu_loader(tmp_path, StandIn()), 1, batch_size=4)


def test_threads_end_with_the_batches(folder):
    before = set(threading.enumerate())
    batches = gpu_loader(folder, StandIn()).batches(BatchOrder(24, 8), 0)
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    assert not set(threading.enumerate()) - before


def test_failures_are_found_by_halving():
    def decoder(encoded):
        if any(int(file[0]) in (2, 5) for file in encoded):
            raise RuntimeError("cannot decode")
        return [file + 100 for file in encoded]

    files = [torch.tensor([number], dtype=torch.uint8) for number in range(7)]
    decoded = decode_or_none(decoder, files)
    assert [None if image is None else int(image[0]) for image in decoded] == [100, 101, None, 103, 104, None, 106]


@pytest.mark.parametrize("sizes", [((40, 60), (50, 30), (33, 33), (9, 90)), ((40, 60),)])
def test_crops_of_different_sizes_are_each_their_own(sizes):
    images = [
        torch.from_numpy(np.array(picture(number, *sizes[number % len(sizes)]))).permute(2, 0, 1)
        for number in range(12)
    ]
    chances = crop_chances(0, 0, range(12)).tolist()
    boxes = [
        crop_box(*image.shape[1:], row, (0.1, 1.0), (0.5, 2.0)) for image, row in zip(images, chances, strict=True)
    ]
    crops = crop_each(images, boxes, (16, 24))
    for crop, image, box in zip(crops, images, boxes, strict=True):
        assert_close(crop, cut(Part(image.permute(1, 2, 0), box), (16, 24)).permute(2, 0, 1))


def test_crops_never_see_the_padding_or_the_rest_of_the_image():
    images, boxes = [], []
    for number, (height, width) in enumerate([(10, 40), (40, 10), (25, 25)]):
        image = torch.full((3, height + 4, width + 4), 255, dtype=torch.uint8)
        image[:, 2:-2, 2:-2] = 40 * number
        images.append(image)
        boxes.append(Box(2, 2, height, width))
    crops = crop_each(images, boxes, (16, 16))
    assert [crop.unique().tolist() for crop in crops] == [[0], [40], [80]]


def test_a_source_of_jpegs_is_known_by_its_files(folder, tmp_path):
    assert are_jpegs(open_source(str(folder)))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(3):
        write(pictures / f"{number}.png", picture(number, 20, 20))
    assert not are_jpegs(open_source(str(pictures)))
    write(pictures / "3.jpg", picture(3, 20, 20))
    assert not are_jpegs(open_source(str(pictures)))
    assert not are_jpegs(open_source("scenes:count=4"))


def open_with(folder, decode, device=CPU, workers=2):
    source = open_source(str(folder))
    bad_images = BadImages(source.name, len(source))
    augment = Augment(RICH, (16, 16))
    return open_loader(source, augment, device, bad_images, 0, mode="streaming", workers=workers, decode=decode)


def test_the_gpu_is_chosen_where_there_is_a_decoder_for_it(folder, monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(loader_module, "gpu_decoder", lambda device: StandIn())
    for decode in ("auto", "gpu"):
        loader = open_with(folder, decode, cuda)
        assert isinstance(loader, GpuStreamingLoader)
        assert loader.description == "streaming: 24 images, decoded on cuda:0, read by 2 threads"
    assert not isinstance(open_with(folder, "cpu", cuda), GpuStreamingLoader)
    assert open_with(folder, "cpu", cuda).description == "streaming: 24 images, decoded by 2 workers"


def test_many_workers_leave_the_gpu_to_the_model_unless_it_is_asked_for(folder, monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(loader_module, "gpu_decoder", lambda device: StandIn())
    kinds = {workers: type(open_with(folder, "auto", cuda, workers)) for workers in (6, 7)}
    assert [choices_of(open_with(folder, "auto", cuda, workers))["decode"] for workers in (6, 7)] == ["gpu", "cpu"]
    assert kinds == {6: GpuStreamingLoader, 7: StreamingLoader}
    assert open_with(folder, "auto", cuda, 8).description == "streaming: 24 images, decoded by 8 workers"
    assert isinstance(open_with(folder, "gpu", cuda, 8), GpuStreamingLoader)


def test_without_a_decoder_the_cpu_decodes_and_the_description_says_so(folder, monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(loader_module, "gpu_decoder", lambda device: None)
    monkeypatch.setattr(loader_module, "decoder_obstacle", lambda device: "no nvJPEG")
    loader = open_with(folder, "auto", cuda)
    assert not isinstance(loader, GpuStreamingLoader)
    why = "torchvision's decoder does not work there: no nvJPEG"
    assert loader.description.endswith(f"2 workers (not on the GPU: {why})")
    with pytest.raises(InputError, match=f"gpu, but {why}: choose auto or cpu"):
        open_with(folder, "gpu", cuda)


def test_on_the_cpu_there_is_nothing_to_choose(folder):
    assert gpu_decoder(CPU) is None
    assert open_with(folder, "auto").description == "streaming: 24 images, decoded by 2 workers"
    with pytest.raises(InputError, match=r"speed\.decode is gpu, but the device is cpu"):
        open_with(folder, "gpu")


@needs_nvjpeg
def test_the_gpu_decodes_as_the_cpu_does(folder):
    cuda = torch.device("cuda", 0)
    loader = open_with(folder, "gpu", cuda)
    ours, theirs = take(loader, 6, crops=True), take(cpu_loader(folder), 6, crops=True)
    for one, other in zip(ours, theirs, strict=True):
        assert one.device == cuda
        # Colours are stored at half the resolution, and the decoders interpolate them differently.
        assert (one.cpu().float() - other.float()).abs().mean() < 3
    for first in (1, 5):
        assert torch.equal(take(loader, 1, first, crops=True)[0], ours[first])


@needs_nvjpeg
def test_the_gpu_survives_all_kinds_of_files(folder):
    write(folder / "00.jpg", picture(0, 30, 40).convert("CMYK"))
    write(folder / "01.jpg", picture(1, 30, 40).convert("L"))
    write(folder / "02.jpg", picture(2, 30, 40), progressive=True)
    write(folder / "03.jpg", picture(3, 30, 40), subsampling=0)
    write(folder / "04.jpg", picture(4, 1, 1))
    damaged = bytearray(write(folder / "05.jpg", picture(5, 30, 40)))
    damaged[-60:-20] = bytes(40)  # In the pixels: without its tables the CPU takes a file for no image at all.
    (folder / "05.jpg").write_bytes(damaged)
    ours = take(open_with(folder, "gpu", torch.device("cuda", 0)), 3, crops=True)
    theirs = take(cpu_loader(folder), 3, crops=True)
    indices = torch.cat([BatchOrder(24, 8).indices(batch) for batch in range(3)])
    difference = (torch.cat(ours).cpu().float() - torch.cat(theirs).float()).abs().mean(dim=(1, 2, 3))
    # What a decoder makes of the damaged file is its own affair.
    assert difference[indices != 5].max() < 6
