"""Which part of an image is seen, and how it is cut: pure functions of seed, epoch and image."""

import io

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms.v2.functional import resized_crop

from stop_mim.data import augment, crops
from stop_mim.data.augment import Augment, AugmentConfig, sample_crop_boxes
from stop_mim.data.crops import (
    Box,
    CropDraws,
    CroppedImages,
    CropRequest,
    Part,
    crop_box,
    crop_chances,
    cut,
    decode_part,
    part_or_next,
)
from stop_mim.data.image_source import ImageSource
from stop_mim.data.images import BadImage, decode_interleaved
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

SCALE, RATIO = (0.3, 1.0), (3 / 4, 4 / 3)


def picture(height, width, number=0):
    coarse = np.random.default_rng(number).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.BICUBIC)


def jpeg(height, width):
    buffer = io.BytesIO()
    picture(height, width).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def crops_of(source, augment, seed, request):
    crops = torch.full((len(request.indices), *augment.size, 3), 77, dtype=torch.uint8)
    bad = CroppedImages(source, augment, seed).fill(crops, request)
    return crops, bad


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "set"
    folder.mkdir()
    for number in range(30):
        image = picture(40 + number, 60 - number, number)
        image.save(folder / f"{number:02d}.{('jpg', 'png', 'jpg')[number % 3]}", quality=95)
    return open_source(str(folder))


def test_chances_are_uniform_and_independent():
    chances = crop_chances(0, 0, range(20_000))
    assert chances.min() >= 0
    assert chances.max() < 1
    # Of 20,000 uniform numbers means deviate by 0.002, and correlations by 0.007.
    assert np.abs(chances.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(chances.std(axis=0) - 12**-0.5).max() < 0.01
    columns = np.concatenate([chances[:-1], chances[1:], crop_chances(0, 1, range(1, 20_000))], axis=1)
    assert np.abs(np.corrcoef(columns.T) - np.eye(columns.shape[1])).max() < 0.04


def test_chances_depend_on_the_seed_the_epoch_and_the_image_alone():
    chances = crop_chances(3, 5, [4, 1_000_000_000, 4])
    assert np.array_equal(chances[1], crop_chances(3, 5, [1_000_000_000])[0])
    assert np.array_equal(chances[0], chances[2])
    for other in (crop_chances(4, 5, [4]), crop_chances(3, 6, [4]), crop_chances(3, 5, [5])):
        assert not np.intersect1d(chances[0], other[0]).size


@pytest.mark.parametrize("size", [(24, 24), (375, 500), (30, 200), (200, 30), (1, 1), (3, 2)])
@pytest.mark.parametrize("scale", [SCALE, (0.01, 0.02), (1.0, 1.0)])
def test_boxes_are_those_of_the_batched_draws(size, scale, monkeypatch):
    chances = crop_chances(0, 0, range(500))
    draws = iter([torch.tensor(chances[:, :-2]).float().view(500, -1, 2), torch.tensor(chances[:, -2:]).float()])
    monkeypatch.setattr(augment, "_uniform", lambda *arguments: next(draws))
    expected = sample_crop_boxes(torch.tensor([size] * 500), scale, RATIO)
    boxes = torch.tensor([crop_box(*size, row, scale, RATIO) for row in chances.tolist()])
    # Those were drawn in single precision, which may round to the next pixel.
    assert (boxes != expected).any(dim=1).float().mean() < 0.01
    assert (boxes - expected).abs().max() <= 1
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor(size)).all()


@pytest.mark.parametrize("box", [Box(0, 0, 50, 70), Box(3, 5, 40, 33), Box(20, 30, 7, 9), Box(49, 69, 1, 1)])
@pytest.mark.parametrize("size", [(16, 16), (24, 12), (64, 80)])
def test_a_crop_is_that_of_torchvision(box, size):
    pixels = torch.from_numpy(np.array(picture(50, 70)))
    expected = resized_crop(pixels.permute(2, 0, 1).contiguous(), *box, list(size), antialias=True)
    for layout in (pixels, pixels.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        crop = cut(Part(layout, box), size)
        assert crop.shape == (*size, 3)
        assert (crop.int() - expected.permute(1, 2, 0).int()).abs().max() <= 1


@pytest.mark.parametrize(("height", "shrink"), [(8 * 32, 8), (8 * 32 - 1, 4), (4 * 32, 4), (4 * 32 - 1, 1)])
def test_large_crops_are_decoded_at_a_part_of_their_size(height, shrink):
    encoded = jpeg(300, 400)
    box = Box(16, 24, height, 304)
    part = decode_part(encoded, "a", lambda rows, columns: box, (32, 32), 10**6)
    assert part.pixels.shape == (-(-300 // shrink), -(-400 // shrink), 3)
    assert part.box.height >= 32
    expected = cut(Part(decode_interleaved(encoded, "a"), box), (32, 32))
    assert (cut(part, (32, 32)).float() - expected.float()).abs().mean() < (2 if shrink > 1 else 0.01)


@pytest.mark.parametrize("sizes", [(257, 261), (1031, 1025)])
def test_a_scaled_box_lies_inside_the_shrunken_image(sizes):
    encoded = jpeg(*sizes)
    for row in crop_chances(0, 0, range(20)).tolist():
        part = decode_part(
            encoded, "a", lambda *size, row=row: crop_box(*size, row, (0.8, 1.0), RATIO), (16, 16), 10**7
        )
        assert part.pixels.shape[0] < sizes[0] / 3
        assert part.box.top + part.box.height <= part.pixels.shape[0]
        assert part.box.left + part.box.width <= part.pixels.shape[1]


def test_the_bound_on_pixels_holds_for_crops():
    with pytest.raises(BadImage, match="400x300 of more than"):
        decode_part(jpeg(300, 400), "a", lambda height, width: Box(0, 0, height, width), (32, 32), 300 * 400 - 1)


def test_a_crop_does_not_depend_on_the_batch_that_it_is_in(source, monkeypatch):
    augmented = Augment(AugmentConfig(), (16, 24))
    whole, bad = crops_of(source, augmented, 7, CropRequest(2, list(range(30))))
    assert bad == []
    for together in ("_READ_TOGETHER", "_PIXELS_CUT_TOGETHER"):
        monkeypatch.setattr(crops, together, 3)
        indices = [29, 3, 17, 4]
        assert torch.equal(crops_of(source, augmented, 7, CropRequest(2, indices))[0], whole[indices])
    assert not torch.equal(crops_of(source, augmented, 7, CropRequest(3, [3]))[0], whole[3:4])


def test_crops_hold_the_box_that_is_drawn(source):
    config = Augment(AugmentConfig(), (16, 16))
    request = CropRequest(1, [5, 6])
    crops, _ = crops_of(source, config, 0, request)
    for place, (index, box_of) in enumerate(zip(request.indices, CropDraws(config, 0).boxes(request), strict=True)):
        image = source.read(index)
        expected = resized_crop(image, *box_of(*image.shape[1:]), [16, 16], antialias=True)
        assert (crops[place].permute(2, 0, 1).int() - expected.int()).abs().max() <= 1


def test_a_source_without_files_is_cropped_too(source):
    class Decoded(ImageSource):
        def __len__(self):
            return len(source)

        def read(self, index):
            return source.read(index)

        def size(self, index):
            return source.size(index)

        def describe(self, index):
            return source.describe(index)

        def fingerprint(self):
            return source.fingerprint()

    request = CropRequest(0, [0, 1, 2])
    augmented = Augment(AugmentConfig(), (16, 16))
    expected, _ = crops_of(source, augmented, 0, request)
    assert torch.equal(crops_of(Decoded("decoded"), augmented, 0, request)[0], expected)


def test_bad_images_are_replaced_and_named(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(20 + number, 30)[: -100 if number in (1, 2) else None])
    source = open_source(str(tmp_path))
    _, bad = crops_of(source, Augment(AugmentConfig(), (16, 16)), 0, CropRequest(0, [1, 3]))
    assert [line.split(":")[0] for line in bad] == [source.describe(1), source.describe(2)]
    part, bad = part_or_next(source, 3, lambda height, width: Box(0, 0, height, width), (16, 16))
    assert part.box == (0, 0, 23, 30)
    assert bad == []


def test_a_file_that_is_gone_is_a_bad_image(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(20, 30))
    source = open_source(str(tmp_path))
    (tmp_path / "0.jpg").unlink()
    augmented = Augment(AugmentConfig(), (16, 16))
    assert crops_of(source, augmented, 0, CropRequest(0, [0]))[1] == [
        f"{source.describe(0)}: No such file or directory"
    ]
    (tmp_path / "1.jpg").unlink()
    with pytest.raises(InputError, match="None of the 2 images"):
        crops_of(source, augmented, 0, CropRequest(0, [0]))
