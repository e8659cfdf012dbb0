"""`Batches`: the same images whatever the placement, labels of the images that are shown, and bad images."""

import itertools
from contextlib import closing

import numpy as np
import PIL.Image
import pytest
import torch
from painted_images import COUNT, Painted, bytes_of, picture, read_colours, write_pictures
from torchvision.transforms.v2 import CenterCrop, Compose, InterpolationMode, Resize

from stop_mim.data import batches as batches_module
from stop_mim.data import gpu_decode, image_source, streamed
from stop_mim.data import stored as stored_module
from stop_mim.data.augment import AugmentConfig, RandomCrop, TestView, WholeImage
from stop_mim.data.batches import Batches, Placement, resident_budget
from stop_mim.data.decode import decode_image
from stop_mim.data.gpu_decode import GpuDecoded, find_gpu_decoder, gpu_obstacle
from stop_mim.data.image_source import BadImages, read_or_next
from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

CPU = torch.device("cpu")
RICH = AugmentConfig(
    crop_scale=(0.3, 1.0), flip_probability=0.5, jitter_probability=0.5, grey_probability=0.2, blur_probability=0.5
)
PLAIN = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
BAD = (0, 17, 18, 41, 59)
ZEROS, ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
WAYS = [("resident", 0), ("streaming", 0), ("streaming", 2)]


def make(source, mode="auto", workers=0, order=None, config=RICH, size=(16, 16), view=None, lenient=True, **options):
    order = order or ShuffledOrder(len(source), 8)
    # One bad image in a hundred is the most that is allowed, and these sets are smaller.
    options.setdefault("bad_images", BadImages(source.name, 10_000) if lenient else None)
    options.setdefault("device", CPU)
    view = view or RandomCrop(config, size)
    return Batches(source, order, view, Placement(mode, "cpu", workers), **options)


def take(batches, count, first=0):
    with closing(batches.starting_at(first)) as found:
        return list(itertools.islice(found, count))


def by_image(batches, count, first=0):
    """{(epoch, image): what is shown of it}."""
    shown = {}
    for number, batch in enumerate(take(batches, count, first), start=first):
        epoch = batches.order.epoch_of(number)
        shown |= {(epoch, index): image for index, image in zip(batch.indices.tolist(), batch.images, strict=True)}
    return shown


@pytest.mark.parametrize("sizes", [((24, 24),), ((24, 24), (21, 27))])
def test_seed_epoch_and_image_decide_what_is_shown_whoever_reads_it(tmp_path, sizes):
    source = open_source(str(write_pictures(tmp_path / "set", sizes=sizes)))
    whole = by_image(make(source, "streaming"), 10)
    assert len(whole) == 2 * 40
    parts = [ShuffledOrder(40, 4, rank=rank, world_size=2) for rank in (0, 1)]
    others = {
        "2 workers": by_image(make(source, "streaming", 2), 10),
        "2 ranks": by_image(make(source, "streaming", order=parts[0]), 10)
        | by_image(make(source, "streaming", 2, order=parts[1]), 10),
        "a restart in mid-epoch": by_image(make(source, "streaming"), 3)
        | by_image(make(source, "streaming", 2), 4, first=3)
        | by_image(make(source, "streaming"), 3, first=7),
        "an order of its own": by_image(make(source, "streaming", order=ShuffledOrder(40, 5, seed=9)), 16),
    }
    for name, shown in others.items():
        assert shown.keys() == whole.keys()
        assert all(torch.equal(image, whole[key]) for key, image in shown.items()), name
    if len(sizes) == 1:
        resident = by_image(make(source, "resident"), 10)
        halves = by_image(make(source, "resident", order=parts[0]), 10) | by_image(
            make(source, "resident", order=parts[1]), 10
        )
        assert all(torch.allclose(image, halves[key], atol=1e-5) for key, image in resident.items())
        differences = torch.stack([(resident[key] - image).abs().mean() for key, image in whole.items()])
        # Streamed crops are rounded to bytes, 0.009 of a deviation at most.
        assert differences.max() < 0.02
    assert (whole[0, 5] - whole[1, 5]).abs().mean() > 0.05
    other = by_image(make(source, "streaming", seed=1), 5)
    assert torch.stack([(other[0, index] - whole[0, index]).abs().mean() for index in range(40)]).min() > 0.01


def test_batches_stay_as_they_are_when_their_memory_is_filled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed, "PIECE", 3)
    source = open_source(str(write_pictures(tmp_path / "set", sizes=((24, 24), (20, 40)), kinds=("jpg",))))
    for one, other in zip(take(make(source, "streaming"), 20), take(make(source, "streaming", 1), 20), strict=True):
        assert torch.equal(one.images, other.images)


@pytest.mark.parametrize(("mode", "workers"), WAYS)
@pytest.mark.parametrize("view", [RandomCrop, WholeImage])
def test_the_label_is_that_of_the_image_that_is_shown_and_bad_images_are_left_out(mode, workers, view):
    source, order, state = Painted(bad=BAD), ShuffledOrder(COUNT, 8, drop_last=False), torch.get_rng_state()
    shown_as = view(AugmentConfig((0.2, 1.0), flip_probability=0.5), (8, 8))
    batches = make(source, mode, workers, order, view=shown_as, labels=source.classes)
    for epoch in (0, 1):
        seen = take(batches, order.batches_per_epoch, epoch * order.batches_per_epoch)
        for batch in seen:
            numbers, painted = read_colours(batch.images)
            assert numbers == batch.indices.tolist()
            assert painted == batch.labels.tolist() == source.classes[numbers].tolist()
        shown = sorted(index for batch in seen for index in batch.indices.tolist())
        assert shown == [index for index in range(COUNT) if index not in BAD]
    assert len(batches.bad_images) == len(BAD)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize(("mode", "workers"), WAYS)
def test_a_bad_image_is_replaced_by_the_next_good_one_if_so_wished(tmp_path, mode, workers):
    file = tmp_path / "bad.txt"
    source = Painted(bad=BAD, sizes=((16, 16),))
    bad_images = BadImages("painted", 10_000, file)
    batches = make(source, mode, workers, config=PLAIN, bad_images=bad_images, replace_bad=True)
    for batch in take(batches, 14):
        expected = {0: 1, 17: 19, 18: 19, 41: 42, 59: 1}
        shown = [expected.get(index, index) for index in batch.indices.tolist()]
        assert read_colours(batch.images)[0] == shown
    assert sorted(file.read_text().splitlines()) == sorted(f"image {index}: torn" for index in BAD)


def test_a_jpeg_that_is_cut_off_is_replaced_or_left_out(tmp_path):
    source = open_source(str(write_pictures(tmp_path / "set", 16, kinds=("jpg",), bad=(7,))))
    order = ShuffledOrder(16, 16)
    for mode in ("resident", "streaming"):
        replaced = by_image(make(source, mode, 0, order, PLAIN, (24, 24), replace_bad=True), 1)
        torch.testing.assert_close(replaced[0, 7], replaced[0, 8])
        assert (0, 7) not in by_image(make(source, mode, 0, order, PLAIN, (24, 24)), 1)
    assert torch.equal(read_or_next(source, 7), source.read(8))


@pytest.mark.parametrize(("mode", "workers"), WAYS)
def test_too_many_bad_images_are_refused(mode, workers):
    source = Painted(100, bad=(3, 44))
    with pytest.raises(InputError, match="2 of the 100 images of 'painted'"):
        take(make(source, mode, workers, lenient=False, replace_bad=True), 12)
    with pytest.raises(InputError, match="None of the 4 images"):
        take(make(Painted(4, bad=range(4)), mode, workers, ShuffledOrder(4, 4), replace_bad=True), 1)


def test_a_batch_of_bad_images_alone_is_empty():
    for mode in ("resident", "streaming"):
        batches = make(Painted(4, bad=range(4)), mode, order=ShuffledOrder(4, 2))
        assert [batch.images.shape for batch in take(batches, 2)] == [(0, 3, 16, 16)] * 2


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_only_the_images_of_the_order_are_read_and_resident_ones_once(mode):
    source, images = Painted(), np.array([50, 3, 4, 29, 11, 30, 58])
    order = ShuffledOrder(images, 3, drop_last=False)
    batches = make(source, mode, order=order, config=AugmentConfig())
    take(batches, 1)
    # Streamed images are read as they are taken.
    assert len(source.reads) == (3 if mode == "streaming" else len(images))
    for batch in take(batches, 3 * order.batches_per_epoch):
        assert read_colours(batch.images)[0] == batch.indices.tolist()
    assert set(source.reads) == set(images)
    assert mode == "streaming" or len(source.reads) == len(images)


@pytest.mark.parametrize(("resize_to", "interpolation"), [(None, "bilinear"), (16, "bicubic")])
@pytest.mark.parametrize(
    ("sizes", "in_memory", "workers"),
    [(((20, 30),), True, 0), (((20, 30), (40, 24), (9, 60)), False, 0), (((20, 30), (40, 24), (9, 60)), False, 2)],
)
def test_test_views_are_those_of_torchvision_bit_by_bit(resize_to, interpolation, sizes, in_memory, workers):
    source, images = Painted(sizes=sizes, in_memory=in_memory), np.array([7, 5, 31, 2, 44])
    view, kind = TestView((14, 12), resize_to, ZEROS, ONES, interpolation), InterpolationMode(interpolation)
    expected = Resize((14, 12), kind) if resize_to is None else Compose([Resize(16, kind), CenterCrop((14, 12))])
    found = take(make(source, "auto", workers, SequentialOrder(images, 2), view=view), 9)
    assert [batch.indices.tolist() for batch in found] == [[7, 5], [31, 2], [44]]
    for index, image in zip(images.tolist(), torch.cat([batch.images for batch in found]), strict=True):
        assert torch.equal((image * 255).round().to(torch.uint8), expected(source.read(index)))


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        (((20, 60), (20, 20)), "18x24"),
        (((20, 60),), "18x24"),
        (((18, 20),), "18x20"),
        # One that is not looked at.
        (((18, 20),) * 9 + ((20, 40),), "18x24"),
    ],
)
def test_a_stored_view_resizes_resident_images_unless_all_are_as_small(monkeypatch, sizes, kept):
    monkeypatch.setattr(image_source, "SIZES_LOOKED_AT", 2)
    source, stored = Painted(16, sizes=sizes), TestView((18, 24), 24)
    view = RandomCrop(PLAIN, (18, 18))
    placement = Placement("resident", workers=0, stored_view=stored)
    batches = Batches(source, ShuffledOrder(16, 16), view, placement, CPU)
    assert batches.description.startswith(f"resident: 16 images of {kept}")
    (batch,) = take(batches, 1)
    # The middle of what is stored.
    shown, middle = (stored.cut, slice(3, 21)) if kept == "18x24" else (torch.clone, slice(1, 19))
    expected = torch.stack([shown(source.read(index))[:, :, middle] for index in batch.indices.tolist()])
    torch.testing.assert_close(bytes_of(batch.images), expected.float(), atol=0.01, rtol=0)


def test_blocks_of_images_in_memory_are_not_fetched(monkeypatch):
    source = Painted(16)
    source.blocks = np.array([8, 16])
    monkeypatch.setattr(source, "fetch", lambda block: pytest.fail("fetched"))
    placement = Placement("resident", workers=0, stored_view=TestView((10, 12), 12))
    batches = Batches(source, ShuffledOrder(16, 8), RandomCrop(PLAIN, (8, 8)), placement, CPU)
    assert len(take(batches, 2)) == 2


def test_images_of_one_size_become_resident_if_they_fit(monkeypatch):
    one, mixed = Painted(), Painted(sizes=((10, 12), (12, 10)))
    assert "resident: 60 images of 10x12" in make(one).description
    assert make(mixed, workers=3).description == "streaming: 60 images, decoded by 3 workers"
    with pytest.raises(InputError, match=r"images of 'painted' differ in size .*choose auto or streaming"):
        make(mixed, "resident")
    some = ShuffledOrder(np.arange(20), 4)
    for budget, mode in ((20 * 3 * 10 * 12, "resident"), (20 * 3 * 10 * 12 - 1, "streaming")):
        # It is the images of the order that have to fit.
        monkeypatch.setattr(batches_module, "resident_budget", lambda device, processes, budget=budget: budget)
        assert make(one, order=some).choices == {"loader": mode, "decode": "cpu"}


def test_images_that_a_gpu_keeps_must_fit_into_the_memory_of_the_host_unless_they_are_there_or_cached(monkeypatch):
    budgets = {"cuda": 60 * 3 * 10 * 12, "cpu": 0}
    monkeypatch.setattr(batches_module, "resident_budget", lambda device, processes: budgets[device.type])
    cases = ((Painted(), False, False), (Painted(), True, True), (Painted(in_memory=True), False, True))
    for source, cached, fits in cases:
        monkeypatch.setattr(batches_module, "is_cacheable", lambda *_, cached=cached: cached)
        batches = make(source, "streaming")
        batches.device = torch.device("cuda")
        assert batches._fits(Placement(), (10, 12)) == fits
        assert not batches._fits(Placement(), (11, 12))


def test_available_memory_includes_caches_of_files_and_ends_at_the_limit_of_a_container(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:  7 kB\nMemAvailable:    4000 kB\nBuffers: 5 kB\n")
    monkeypatch.setattr(batches_module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(batches_module, "CONTAINER_LIMIT", tmp_path / "memory.max")
    for limit, available in (("max\n", 4000 * 1024), ("81920\n", 81920), (f"{10**18}\n", 4000 * 1024)):
        (tmp_path / "memory.max").write_text(limit)
        assert resident_budget(CPU, processes_on_host=4) == available // 16
    (tmp_path / "memory.max").unlink()
    assert resident_budget(CPU, processes_on_host=4) == 4000 * 1024 // 16
    # macOS has no such file.
    monkeypatch.setattr(batches_module, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert resident_budget(CPU, processes_on_host=4) == 1000 * 4096 // 16


def test_one_pass_is_resident_only_where_images_are_decoded_already(monkeypatch):
    order = SequentialOrder(60, 8)
    for source, mode in ((Painted(in_memory=True), "resident"), (Painted(), "streaming")):
        assert make(source, order=order).choices["loader"] == mode
    monkeypatch.setattr(batches_module, "is_cacheable", lambda *_: True)
    assert make(Painted(), order=order).choices["loader"] == "resident"


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_streamed_if_one_that_was_not_looked_at_has_another_size(monkeypatch, workers):
    monkeypatch.setattr(image_source, "SIZES_LOOKED_AT", 2)
    monkeypatch.setattr(stored_module, "_PIXELS_A_WORKER", 1)
    source = Painted(10, sizes=((24, 24),) * 9 + ((20, 40),))
    assert make(source, workers=workers).choices["loader"] == "streaming"
    with pytest.raises(InputError, match="choose auto or streaming"):
        make(source, "resident", workers)


@pytest.mark.gpu
@pytest.mark.parametrize("replace_bad", [False, True])
@pytest.mark.parametrize("budget", [10**9, 0])
@pytest.mark.parametrize(("mode", "workers"), WAYS)
def test_a_gpu_shows_what_the_cpu_shows(mode, workers, budget, replace_bad, monkeypatch):
    gpu = torch.device("cuda", 0)
    assert resident_budget(gpu) > 0
    # Without room on the GPU, resident images are copied there batch by batch.
    monkeypatch.setattr(batches_module, "resident_budget", lambda device, processes: budget)
    source = Painted(bad=BAD)
    options = {"labels": source.classes, "replace_bad": replace_bad}
    batches = [make(source, mode, workers, device=device, **options) for device in (CPU, gpu)]
    for ours, theirs in zip(*(take(one, 14, first=3) for one in batches), strict=True):
        assert theirs.images.device == theirs.labels.device == gpu
        assert ours.indices.equal(theirs.indices)
        assert ours.labels.equal(theirs.labels.cpu())
        torch.testing.assert_close(ours.images, theirs.images.cpu(), atol=1e-3, rtol=0)


class StandIn:
    """Decodes as nvJPEG would, all or nothing, some with a wrong size, and remembers what it was given."""

    def __init__(self, refused=(), wrong=()):
        self.refused, self.wrong, self.calls = refused, wrong, []

    def __call__(self, encoded):
        files = [bytes(file.numpy()) for file in encoded]
        self.calls.append(files)
        if any(file in self.refused for file in files):
            raise RuntimeError("nvjpegDecodeBatched failed")
        return [decode_image(file, "a")[:, int(file in self.wrong) :] for file in files]

    @property
    def decoded(self):
        return {file for files in self.calls if not set(files) & set(self.refused) for file in files}


def decoded_by(decoder, source, workers=2, **options):
    """Batches that are decoded as on a GPU."""
    batches = make(source, "streaming", **options)
    batches._reader = GpuDecoded(batches._reader.cutter, CPU, workers, decoder)
    return batches


@pytest.fixture
def jpegs(tmp_path):
    return write_pictures(tmp_path / "set", 24, sizes=((30, 50), (31, 49), (36, 46)), kinds=("jpg",))


def test_what_a_gpu_cannot_decode_is_decoded_on_the_cpu(jpegs, monkeypatch):
    upside_down = PIL.Image.Exif()
    upside_down[0x0112] = 3
    picture(0, 30, 40).convert("CMYK").save(jpegs / "0000.jpg")
    picture(1, 30, 40).save(jpegs / "0001.jpg", exif=upside_down)
    for number, kind in ((2, "png"), (3, "webp")):
        (jpegs / f"{number:04d}.jpg").unlink()
        picture(number, 30, 40).save(jpegs / f"{number:04d}.{kind}")
    picture(4, 60, 60).save(jpegs / "0004.jpg")
    picture(5, 30, 40).convert("L").save(jpegs / "0005.jpg")
    # A JPEG ends with its marker, and with zeros after it at most.
    for number, ending in ((6, b"more"), (8, bytes(10))):
        with (jpegs / f"{number:04d}.jpg").open("ab") as file:
            file.write(ending)
    monkeypatch.setattr(gpu_decode, "PIXELS_AT_ONCE", 36 * 46)
    source = open_source(str(jpegs))
    files = [source.encoded(index) for index in range(24)]
    decoder = StandIn(refused=(files[7], files[20]), wrong=(files[21],))
    expected, found = by_image(make(source, "streaming"), 3), by_image(decoded_by(decoder, source), 3)
    assert max((found[key] - image).abs().mean() for key, image in expected.items()) < 0.01
    assert decoder.decoded == set(files[7:]) - set(decoder.refused)


def test_bad_images_among_those_for_a_gpu_are_replaced_or_left_out(jpegs):
    path = jpegs / "0007.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    source = open_source(str(jpegs))
    for replace_bad in (True, False):
        bad_images = BadImages("set", 1000)
        options = {"config": PLAIN, "bad_images": bad_images, "replace_bad": replace_bad}
        expected = by_image(make(source, "streaming", **options), 3)
        found = by_image(decoded_by(StandIn(), source, **options), 3)
        assert found.keys() == expected.keys()
        assert max((found[key] - image).abs().mean() for key, image in expected.items()) < 0.01
        assert len(bad_images) == 1
        assert ((0, 7) in found) == replace_bad


def test_a_gpu_decodes_jpegs_where_it_can_unless_many_workers_do(jpegs, tmp_path, monkeypatch):
    gpu = torch.device("cuda", 0)

    def find(decode, workers=2, source=None, device=gpu):
        view = RandomCrop(PLAIN, (16, 16))
        return find_gpu_decoder(source or open_source(str(jpegs)), view, device, decode, workers)

    monkeypatch.setattr(gpu_decode, "gpu_obstacle", lambda device: "")
    assert [find("auto", workers)[0] is not None for workers in (6, 7)] == [True, False]
    assert [find(decode, 8)[0] is not None for decode in ("gpu", "cpu")] == [True, False]
    pictures = open_source(str(write_pictures(tmp_path / "png", 8)))
    assert find("auto", source=pictures) == (None, f"the images of '{pictures.name}' are not stored as JPEGs")
    monkeypatch.setattr(gpu_decode, "gpu_obstacle", lambda device: "no nvJPEG")
    assert "no nvJPEG" in find("auto")[1]
    with pytest.raises(InputError, match="no nvJPEG"):
        find("gpu")
    assert find("auto", device=CPU) == (None, "")
    with pytest.raises(InputError, match="the device is cpu"):
        find("gpu", device=CPU)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and bool(gpu_obstacle(torch.device("cuda", 0))), reason="torchvision cannot decode JPEGs"
)
def test_a_gpu_decodes_as_the_cpu_does_and_survives_all_kinds_of_files(jpegs):
    picture(0, 30, 40).convert("CMYK").save(jpegs / "0000.jpg")
    picture(1, 30, 40).convert("L").save(jpegs / "0001.jpg")
    picture(2, 30, 40).save(jpegs / "0002.jpg", progressive=True)
    picture(3, 30, 40).save(jpegs / "0003.jpg", subsampling=0)
    picture(4, 1, 1).save(jpegs / "0004.jpg")
    damaged = bytearray((jpegs / "0005.jpg").read_bytes())
    damaged[-60:-20] = bytes(40)
    (jpegs / "0005.jpg").write_bytes(damaged)
    source, gpu = open_source(str(jpegs)), torch.device("cuda", 0)
    view, order = RandomCrop(AugmentConfig(), (16, 16)), ShuffledOrder(24, 8)
    bad_images = BadImages("set", 10_000)
    batches = Batches(source, order, view, Placement("streaming", "gpu"), gpu, bad_images=bad_images, replace_bad=True)
    assert batches.choices == {"loader": "streaming", "decode": "gpu"}
    expected = by_image(make(source, "streaming", config=AugmentConfig(), replace_bad=True), 6)
    found = by_image(batches, 6)
    for key, image in expected.items():
        # Decoders interpolate colours differently, and what they make of a damaged file is their own affair.
        assert key[1] == 5 or (found[key].cpu() - image).abs().mean() < 0.1
    for first in (1, 5):
        (batch,) = take(batches, 1, first)
        assert torch.equal(batch.images, torch.stack([found[order.epoch_of(first), i] for i in batch.indices.tolist()]))
