"""Every augmentation against torchvision's, image by image; and what the batch owes: bounds, chances, repeatability."""

import dataclasses
import math

import pytest
import torch
from random_images import RATIO, SCALE, any_boxes, random_bytes, random_floats, repeated, seeded
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from stop_mim.data import augment
from stop_mim.data.augment import Augment, AugmentConfig
from stop_mim.errors import InputError

EVERYTHING = AugmentConfig(flip_probability=0.5, blur_probability=0.5, grey_probability=0.2, jitter_probability=0.8)


def resized_crop(image: torch.Tensor, box: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    return reference.resized_crop(image, *box.tolist(), list(size), InterpolationMode(mode), antialias=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("stored", "size"), [((64, 64), (64, 64)), ((40, 56), (16, 24)), ((20, 12), (48, 33)), ((150, 200), (64, 7))]
)
def test_crop_and_resize_equals_torchvision(mode, stored, size):
    boxes = any_boxes(*stored, count=13)
    images = random_floats(len(boxes), *stored)
    expected = torch.stack([resized_crop(i, box, size, mode) for i, box in zip(images, boxes, strict=True)])
    torch.testing.assert_close(augment.crop_and_resize(images, boxes, size, None, mode), expected, atol=1e-5, rtol=0)


def test_crop_and_resize_of_bytes_keeps_their_scale():
    images, boxes = random_bytes(16, 48, 64), any_boxes(48, 64, count=13)
    expected = torch.stack(
        [resized_crop(i.float(), box, (32, 32), "bilinear") for i, box in zip(images, boxes, strict=True)]
    )
    torch.testing.assert_close(augment.crop_and_resize(images, boxes, (32, 32)), expected, atol=1e-3, rtol=0)


def test_flip_mirrors_the_chosen_images_only():
    boxes = any_boxes(40, 56, count=13)
    images, flip = random_floats(len(boxes), 40, 56), torch.arange(len(boxes)) % 2 == 0
    plain = augment.crop_and_resize(images, boxes, (24, 32))
    flipped = augment.crop_and_resize(images, boxes, (24, 32), flip)
    assert flipped[~flip].equal(plain[~flip])
    torch.testing.assert_close(flipped[flip], plain[flip].flip(3), atol=1e-5, rtol=0)


def test_crop_keeps_full_precision_under_autocast():
    images, boxes = random_floats(16, 40, 40), any_boxes(40, 40, count=13)
    plain = augment.crop_and_resize(images, boxes, (32, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert augment.crop_and_resize(images, boxes, (32, 32)).equal(plain)


def test_crop_reads_any_memory_layout():
    images, boxes = random_floats(16, 40, 40), any_boxes(40, 40, count=13)
    strided = images.to(memory_format=torch.channels_last)
    crops = augment.crop_and_resize(strided, boxes, (32, 32))
    assert crops.equal(augment.crop_and_resize(images, boxes, (32, 32)))
    assert crops.is_contiguous()


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (45, 224)])
def test_blur_equals_torchvision(size):
    images, sigmas = random_floats(6, *size), torch.tensor([0.1, 0.3, 0.7, 1.0, 1.5, 2.0])
    kernel = [augment.blur_kernel_size(size[1]), augment.blur_kernel_size(size[0])]
    expected = [reference.gaussian_blur(i, kernel, [s, s]) for i, s in zip(images, sigmas.tolist(), strict=True)]
    torch.testing.assert_close(augment.gaussian_blur(images, sigmas), torch.stack(expected), atol=1e-5, rtol=0)


def test_blur_of_sigma_zero_changes_no_bit():
    images = random_floats(4)
    blurred = augment.gaussian_blur(images, torch.tensor([0.0, 1.0, 0.0, 2.0]))
    assert blurred[::2].equal(images[::2])
    assert (blurred[1::2] - images[1::2]).abs().mean() > 0.05


def test_blur_kernels_are_odd_tenths():
    assert [augment.blur_kernel_size(length) for length in (2, 32, 64, 96, 224)] == [3, 3, 7, 9, 23]


def test_grey_equals_torchvision():
    images, chosen = random_floats(6), torch.tensor([True, False, True, False, False, True])
    grey = augment.to_grey(images, chosen)
    torch.testing.assert_close(grey[chosen], reference.rgb_to_grayscale(images[chosen], 3), atol=1e-6, rtol=0)
    assert grey[~chosen].equal(images[~chosen])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (0,), (1,), (2,), (3,), ()])
def test_colours_equal_torchvisions(order):
    images = random_floats(8)
    images[0], images[1, 2:], images[2, 0], images[3, :2] = 0.5, 0.0, 1.0, images[3, :1].clone()
    brightness, contrast, saturation = torch.rand(3, 8, generator=seeded(1)) * 1.6 + 0.2
    hue = torch.linspace(-0.5, 0.5, 8)
    steps = (
        (reference.adjust_brightness, brightness),
        (reference.adjust_contrast, contrast),
        (reference.adjust_saturation, saturation),
        (reference.adjust_hue, hue),
    )
    expected = []
    for index, image in enumerate(images):
        for step in order:
            adjust, amounts = steps[step]
            image = adjust(image, amounts[index].item())
        expected.append(image)
    adjusted = augment.adjust_colours(images, brightness, contrast, saturation, hue, order)
    torch.testing.assert_close(adjusted, torch.stack(expected), atol=1e-5, rtol=0)
    assert 0 <= adjusted.min() <= adjusted.max() <= 1


def test_normalise_equals_torchvision():
    images = random_bytes(4)
    scaled = images / 255
    expected = reference.normalize(scaled, list(augment.IMAGENET_MEAN), list(augment.IMAGENET_STD))
    torch.testing.assert_close(augment.normalise(images), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(augment.normalise(scaled), expected, atol=1e-5, rtol=0)
    halves = augment.normalise(images, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.testing.assert_close(halves, scaled * 2 - 1, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(16, 24), (64, 64), (33, 20)])
def test_resize_batch_equals_torchvision_on_floats(size):
    images = random_bytes(4, 40, 56)
    resized = augment.resize_batch(images, size)
    assert resized.dtype == torch.uint8
    expected = reference.resize(images.float(), list(size), antialias=True)
    assert resized.equal(expected.round().to(torch.uint8))
    assert augment.resize_batch(images, (40, 56)).equal(images)


def test_augment_is_crop_and_normalise_by_default():
    images = random_bytes(8, 40, 56)
    boxes = augment.sample_crop_boxes(repeated((40, 56), 8), SCALE, RATIO, seeded(3))
    expected = augment.normalise(augment.crop_and_resize(images, boxes, (24, 32)) / 255)
    assert Augment(AugmentConfig(), (24, 32))(images, seeded(3)).equal(expected)


@pytest.mark.parametrize("crop", [True, False])
def test_augment_repeats_with_a_generator_and_varies_without(crop):
    images, transform = random_bytes(16), Augment(EVERYTHING, (32, 32))
    apply = transform if crop else transform.without_crop
    before = images.clone()
    first = apply(images, seeded(1))
    assert first.equal(apply(images, seeded(1)))
    assert not first.equal(apply(images, seeded(2)))
    assert not apply(images).equal(apply(images))
    assert images.equal(before)
    assert first.isfinite().all()


STAGES = ("flip_probability", "blur_probability", "grey_probability", "jitter_probability")


@pytest.mark.parametrize("stage", STAGES)
def test_probabilities_are_shares_of_images(stage):
    count = 400
    images = random_bytes(count, 8, 8)
    plain = Augment(AugmentConfig(), (8, 8)).without_crop(images)

    def share_changed(probability: float) -> float:
        transform = Augment(AugmentConfig(**{stage: probability}, blur_sigma=(0.5, 2.0)), (8, 8))
        return (transform.without_crop(images, seeded(5)) != plain).flatten(1).any(dim=1).double().mean().item()

    assert plain.equal(augment.normalise(images.float() / 255))
    assert share_changed(0.0) == 0
    assert share_changed(1.0) == 1
    assert share_changed(0.5) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / count))


@pytest.mark.parametrize("stage", STAGES[1:])
def test_images_that_are_not_chosen_are_the_plain_crops(stage):
    images = random_bytes(200, 16, 16)
    plain = Augment(AugmentConfig(), (16, 16))(images, seeded(5))
    some = Augment(AugmentConfig(**{stage: 0.5}, blur_sigma=(0.5, 2.0)), (16, 16))(images, seeded(5))
    same = (some == plain).flatten(1).all(dim=1).sum().item()
    assert abs(same - 100) < 4 * math.sqrt(200 * 0.25)


def test_jitter_reaches_its_bounds_and_no_further():
    images = torch.full((500, 3, 4, 4), 100, dtype=torch.uint8)
    config = AugmentConfig(jitter_probability=1.0, jitter_brightness=0.5)
    transform = Augment(config, (4, 4), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    factors = transform.without_crop(images, seeded())[:, 0, 0, 0] * 255 / 100
    assert 0.5 - 1e-4 <= factors.min() < 0.52
    assert 1.48 < factors.max() <= 1.5 + 1e-4
    assert factors.mean().item() == pytest.approx(1, abs=4 * 0.5 / math.sqrt(3 * 500))


def test_original_sizes_decide_the_crops():
    images, sizes = random_bytes(64, 48, 48), torch.tensor([[50, 150], [150, 50]] * 32)
    transform = Augment(AugmentConfig(), (32, 32))
    boxes = augment.sample_crop_boxes(sizes, SCALE, RATIO, seeded(6))
    stored = augment.scale_boxes(boxes, sizes, (48, 48))
    expected = augment.normalise(augment.crop_and_resize(images, stored, (32, 32)) / 255)
    assert transform(images, seeded(6), sizes).equal(expected)
    # A wide image squashed to a square: its nearly square crops are tall in what is stored.
    ratios = stored[:, 3] / stored[:, 2]
    assert (ratios[::2] < 0.6).all()
    assert (ratios[1::2] > 1 / 0.6).all()


def test_original_sizes_equal_to_the_stored_one_change_nothing():
    images, transform = random_bytes(16, 48, 64), Augment(EVERYTHING, (32, 32))
    assert transform(images, seeded(), repeated((48, 64), 16)).equal(transform(images, seeded()))


def test_without_crop_flips_whole_images():
    images = random_bytes(8)
    flipped = Augment(AugmentConfig(flip_probability=1.0), (32, 32)).without_crop(images)
    assert flipped.equal(augment.normalise(images.flip(3).float() / 255))


def test_repr_tells_what_is_done():
    text = repr(Augment(EVERYTHING, (32, 48)))
    assert "size=(32, 48)" in text
    assert "jitter_probability=0.8" in text


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("crop_scale", (0.5, 0.3), "the smaller one first"),
        ("crop_scale", (0.0, 1.0), "above 0"),
        ("crop_scale", (0.3, 1.5), "at most 1"),
        ("crop_ratio", (2.0, 1.0), "the smaller one first"),
        ("crop_ratio", (0.5, math.inf), "two numbers"),
        ("crop_ratio", (math.nan, 1.0), "two numbers"),
        ("blur_sigma", (-1.0, 2.0), "above 0"),
        *((stage, value, "from 0 to 1") for stage in STAGES for value in (-0.1, 1.1, math.nan)),
        ("jitter_brightness", -0.1, "at least 0"),
        ("jitter_contrast", math.inf, "at least 0"),
        ("jitter_saturation", math.nan, "at least 0"),
        ("jitter_hue", 0.6, "from 0 to 0.5"),
    ],
)
def test_config_refuses(field, value, remedy):
    with pytest.raises(InputError) as error:
        AugmentConfig(**{field: value})
    message = str(error.value)
    assert message.startswith(f"augment.{field} is {value}: ")
    assert remedy in message


def test_config_is_frozen_and_defaults_to_the_paper():
    config = AugmentConfig()
    assert (config.crop_scale, config.crop_ratio) == (SCALE, RATIO)
    assert not any(getattr(config, stage) for stage in STAGES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.flip_probability = 0.5


def test_bad_arguments_are_named():
    images, transform = random_bytes(2), Augment(AugmentConfig(), (16, 16))
    with pytest.raises(InputError, match=r"size is \(0, 16\)"):
        Augment(AugmentConfig(), (0, 16))
    with pytest.raises(InputError, match=r"images are \(32, 32\) pixels: crop them to \(16, 16\)"):
        transform.without_crop(images)
    with pytest.raises(InputError, match="interpolation is 'area': choose one of bilinear, bicubic"):
        augment.crop_and_resize(images, any_boxes(32, 32, 0)[:2], (16, 16), None, "area")
    with pytest.raises(InputError, match=r"order is \(0, 4\)"):
        augment.adjust_colours(random_floats(2), *torch.ones(4, 2), (0, 4))
    with pytest.raises(InputError, match="scale is"):
        augment.sample_crop_boxes(repeated((8, 8), 2), (0.5, 2.0), RATIO)
    with pytest.raises(InputError, match=r"images are torch\.float32: give bytes"):
        augment._check_bytes(random_floats(2))
    with pytest.raises(InputError, match="generator is on cpu: make it on the images' device, meta"):
        augment._uniform((2,), torch.device("meta"), seeded())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to see the host wait for it")
def test_the_host_never_waits_for_the_device():
    images, sizes = random_bytes(16).cuda(), repeated((64, 96), 16).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    transform = Augment(EVERYTHING, (24, 24))
    transform(images, generator)
    try:
        torch.cuda.set_sync_debug_mode("error")
        transform(images, generator, sizes)
        Augment(EVERYTHING, (32, 32)).without_crop(images, generator)
        augment.resize_batch(images, (48, 48))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to compare with the CPU")
def test_cuda_computes_what_the_cpu_does():
    images, boxes = random_bytes(16, 40, 56), any_boxes(40, 56, count=13)
    for mode in ("bilinear", "bicubic"):
        ours = augment.crop_and_resize(images.cuda(), boxes.cuda(), (24, 32), None, mode).cpu()
        torch.testing.assert_close(
            ours, augment.crop_and_resize(images, boxes, (24, 32), None, mode), atol=1e-3, rtol=0
        )
