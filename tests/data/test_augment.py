"""Views: draws are functions of (seed, epoch, image), and every step equals torchvision's, image by image."""

import math
import re

import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from stop_mim.data import augment
from stop_mim.data.augment import AugmentConfig, RandomCrop, TestView, WholeImage, crop_boxes, draw
from stop_mim.errors import InputError

EVERYTHING = AugmentConfig(flip_probability=0.5, blur_probability=0.5, grey_probability=0.2, jitter_probability=0.8)
STAGES = ("flip_probability", "blur_probability", "grey_probability", "jitter_probability")
SCALE, RATIO = (0.3, 1.0), (3 / 4, 4 / 3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=seeded(seed))


def random_floats(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=seeded(seed))


def repeated(size: tuple[int, int], count: int) -> torch.Tensor:
    return torch.tensor([size]).expand(count, 2)


def any_boxes(height: int, width: int, count: int) -> torch.Tensor:
    """Boxes of every shape, with the whole image and single pixels in opposite corners among them."""
    edges = [torch.randint(0, n + 1, (count, 2), generator=seeded(n)).sort(dim=1).values for n in (height, width)]
    starts = torch.stack([e[:, 0] for e in edges], 1).minimum(torch.tensor([height - 1, width - 1]))
    extents = torch.stack([e[:, 1] for e in edges], 1).sub(starts).clamp(min=1)
    special = torch.tensor([[0, 0, height, width], [0, 0, 1, 1], [height - 1, width - 1, 1, 1]])
    return torch.cat([special, torch.cat([starts, extents], dim=1)])


def some_draws(count, epoch=0):
    return draw(0, epoch, torch.arange(count))


def test_draws_are_uniform_and_independent():
    draws = some_draws(20_000)
    assert 0 <= draws.min() < draws.max() < 1
    # Of 20,000 uniform numbers means deviate by 0.002, and correlations by 0.007.
    assert (draws.mean(0) - 0.5).abs().max() < 0.01
    assert (draws.std(0) - 12**-0.5).abs().max() < 0.01
    columns = torch.cat([draws[:-1], draws[1:], some_draws(20_000, epoch=1)[1:]], dim=1)
    assert (columns.T.corrcoef() - torch.eye(columns.shape[1])).abs().max() < 0.04


def test_draws_depend_on_the_seed_the_epoch_and_the_image_alone():
    draws = draw(3, 5, torch.tensor([4, 1_000_000_000, 4]))
    assert draws[1].equal(draw(3, 5, torch.tensor([1_000_000_000]))[0])
    assert draws[0].equal(draws[2])
    for other in (draw(4, 5, torch.tensor([4])), draw(3, 6, torch.tensor([4])), draw(3, 5, torch.tensor([5]))):
        assert not torch.isin(draws[0], other[0]).any()


def test_draws_are_those_of_splitmix64(monkeypatch):
    # The reference implementation, https://prng.di.unimi.it/splitmix64.c, from the state 1234567.
    monkeypatch.setattr(augment, "derive_seed", lambda *_: 1234567)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draw(0, 0, torch.tensor([0]))[0, :4].tolist() == [(number >> 11) * 2.0**-53 for number in expected]


def measures(boxes, height, width):
    top, left, h, w = boxes.double().unbind(1)
    return {
        "area": h * w / (height * width),
        "log ratio": (w / h).log(),
        "top": top / height,
        "left": left / width,
        "bottom": (top + h) / height,
    }


def kolmogorov_distance(first, second):
    points = torch.cat([first, second]).unique()
    shares = [torch.searchsorted(s.sort().values, points, right=True) / len(s) for s in (first, second)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize("size", [(64, 64), (120, 90), (40, 120)])
def test_boxes_are_distributed_as_torchvisions(size):
    count = 8000
    torch.manual_seed(1)
    image = torch.empty(1, *size)
    expected = torch.tensor([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(count)])
    boxes = crop_boxes(repeated(size, count), some_draws(count), SCALE, RATIO)
    # The Kolmogorov-Smirnov bound that equal distributions pass 999 times in 1000.
    bound = math.sqrt(-math.log(0.001 / 2) / 2) * math.sqrt(2 / count)
    ours, theirs = measures(boxes, *size), measures(expected, *size)
    for name in ours:
        assert kolmogorov_distance(ours[name], theirs[name]) < bound, name
    # Elongated images fall back to the central crop.
    central = torch.tensor([0, 33, 40, 53])
    shares = [(found == central).all(dim=1).double().mean().item() for found in (boxes, expected)]
    assert shares[0] == pytest.approx(shares[1], abs=4 * math.sqrt(2 * 0.25 / count))
    assert shares[0] > 0.2 or size != (40, 120)


def test_boxes_lie_inside_images_of_any_size():
    sizes = torch.randint(1, 700, (20_000, 2), generator=seeded(5))
    boxes = crop_boxes(sizes, some_draws(20_000), (0.01, 1.0), (0.2, 5.0))
    assert boxes.dtype == sizes.dtype
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


def resized_crop(image, box, size, interpolation):
    kind = InterpolationMode(interpolation)
    return reference.resized_crop(image, *box.tolist(), list(size), interpolation=kind, antialias=True)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("stored", "size"), [((64, 64), (64, 64)), ((40, 56), (16, 24)), ((20, 12), (48, 33)), ((150, 200), (64, 7))]
)
def test_crop_and_resize_equals_torchvision(stored, size, interpolation):
    boxes = any_boxes(*stored, count=13)
    images = random_floats(len(boxes), *stored)
    expected = torch.stack([resized_crop(i, box, size, interpolation) for i, box in zip(images, boxes, strict=True)])
    found = augment.crop_and_resize(images, boxes, size, None, interpolation)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    # Bytes keep their scale, and the range of bytes.
    as_bytes = (images * 255).round().to(torch.uint8)
    pairs = zip(as_bytes, boxes, strict=True)
    expected = torch.stack([resized_crop(i.float(), box, size, interpolation) for i, box in pairs]).clamp(0, 255)
    found = augment.crop_and_resize(as_bytes, boxes, size, None, interpolation)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)


def test_flip_mirrors_the_chosen_images_only():
    boxes = any_boxes(40, 56, count=13)
    images, flip = random_floats(len(boxes), 40, 56), torch.arange(len(boxes)) % 2 == 0
    plain = augment.crop_and_resize(images, boxes, (24, 32))
    flipped = augment.crop_and_resize(images, boxes, (24, 32), flip)
    assert flipped[~flip].equal(plain[~flip])
    torch.testing.assert_close(flipped[flip], plain[flip].flip(3), atol=1e-5, rtol=0)


def test_crop_keeps_full_precision_under_autocast_and_reads_any_memory_layout():
    images, boxes = random_floats(16, 40, 40), any_boxes(40, 40, count=13)
    plain = augment.crop_and_resize(images, boxes, (32, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert augment.crop_and_resize(images.to(memory_format=torch.channels_last), boxes, (32, 32)).equal(plain)


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (45, 224)])
def test_blur_equals_torchvision(size):
    images, sigmas = random_floats(6, *size), torch.tensor([0.1, 0.3, 0.7, 1.0, 1.5, 2.0])
    kernel = [augment.blur_kernel_size(size[1]), augment.blur_kernel_size(size[0])]
    expected = [reference.gaussian_blur(i, kernel, [s, s]) for i, s in zip(images, sigmas.tolist(), strict=True)]
    torch.testing.assert_close(augment.gaussian_blur(images, sigmas), torch.stack(expected), atol=1e-5, rtol=0)


def test_colours_equal_torchvisions():
    images = random_floats(8)
    images[0], images[1, 2:], images[2, 0], images[3, :2] = 0.5, 0.0, 1.0, images[3, :1].clone()
    brightness, contrast, saturation = torch.rand(3, 8, generator=seeded(1)) * 1.6 + 0.2
    expected = []
    for index, image in enumerate(images):
        image = reference.adjust_brightness(image, brightness[index].item())
        image = reference.adjust_contrast(image, contrast[index].item())
        expected.append(reference.adjust_saturation(image, saturation[index].item()))
    adjusted = augment.adjust_colours(images, brightness, contrast, saturation)
    torch.testing.assert_close(adjusted, torch.stack(expected), atol=1e-5, rtol=0)
    assert 0 <= adjusted.min() <= adjusted.max() <= 1
    grey = WholeImage(AugmentConfig(grey_probability=1.0), (32, 32), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    pixels = random_bytes(6)
    expected = reference.rgb_to_grayscale(pixels / 255, 3)
    torch.testing.assert_close(grey.of_cut(pixels, some_draws(6)), expected, atol=1e-6, rtol=0)


def test_normalise_and_resize_equal_torchvision():
    images = random_bytes(4, 40, 56)
    scaled = images / 255
    expected = reference.normalize(scaled, list(augment.IMAGENET_MEAN), list(augment.IMAGENET_STD))
    torch.testing.assert_close(augment.normalise(images), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(augment.normalise(scaled), expected, atol=1e-5, rtol=0)
    for size in ((16, 24), (64, 64), (33, 20)):
        expected = reference.resize(images.float(), list(size), antialias=True)
        assert augment.resize_batch(images, size).equal(expected.round().to(torch.uint8))
    assert augment.resize_batch(images, (40, 56)).equal(images)


def test_a_view_is_crop_and_normalise_by_default_and_leaves_its_images_alone():
    images, draws = random_bytes(8, 40, 56), some_draws(8)
    before, view = images.clone(), RandomCrop(AugmentConfig(), (24, 32))
    boxes = crop_boxes(repeated((40, 56), 8), draws, SCALE, RATIO)
    expected = augment.normalise(augment.crop_and_resize(images, boxes, (24, 32)) / 255)
    assert view.of_whole(images, draws).equal(expected)
    RandomCrop(EVERYTHING, (40, 56)).of_cut(images, draws)
    assert images.equal(before)


@pytest.mark.parametrize("stage", STAGES)
def test_probabilities_are_shares_of_images_and_the_others_are_not_changed(stage):
    count = 400
    images, draws = random_bytes(count, 8, 8), some_draws(count)
    plain = [getattr(RandomCrop(AugmentConfig(), (8, 8)), name)(images, draws) for name in ("of_cut", "of_whole")]
    for probability in (0.0, 0.5, 1.0):
        view = RandomCrop(AugmentConfig(**{stage: probability}, blur_sigma=(0.5, 2.0)), (8, 8))
        for found, unchanged in zip((view.of_cut(images, draws), view.of_whole(images, draws)), plain, strict=True):
            share = (found != unchanged).flatten(1).any(dim=1).double().mean().item()
            bound = 4 * math.sqrt(0.25 / count) if probability == 0.5 else 0
            assert share == pytest.approx(probability, abs=bound)
    flipped = WholeImage(AugmentConfig(flip_probability=1.0), (8, 8)).of_cut(images, draws)
    assert flipped.equal(augment.normalise(images.flip(3).float() / 255))


def test_jitter_reaches_its_bounds_and_no_further():
    images = torch.full((500, 3, 4, 4), 100, dtype=torch.uint8)
    config = AugmentConfig(jitter_probability=1.0, jitter_brightness=0.5)
    view = RandomCrop(config, (4, 4), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    factors = view.of_cut(images, some_draws(500))[:, 0, 0, 0] * 255 / 100
    assert 0.5 - 1e-4 <= factors.min() < 0.52
    assert 1.48 < factors.max() <= 1.5 + 1e-4
    assert factors.mean().item() == pytest.approx(1, abs=4 * 0.5 / math.sqrt(3 * 500))


@pytest.mark.parametrize(
    ("field", "value"),
    [("crop_scale", (0.3, 1.5)), ("blur_sigma", (-1.0, 2.0)), ("flip_probability", 1.1), ("jitter_brightness", -0.1)],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InputError, match=re.escape(f"augment.{field} is {value}")):
        AugmentConfig(**{field: value})


def test_impossible_sizes_are_named():
    for kind in (lambda size: RandomCrop(AugmentConfig(), size), TestView):
        with pytest.raises(InputError, match=r"\(0, 16\)"):
            kind((0, 16))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
def test_the_host_never_waits_for_the_device():
    images, numbers = random_bytes(16).cuda(), torch.arange(16).cuda()
    views = RandomCrop(EVERYTHING, (24, 24)), RandomCrop(EVERYTHING, (32, 32))
    views[0].of_whole(images, draw(0, 0, numbers))
    try:
        torch.cuda.set_sync_debug_mode("error")
        draws = draw(0, 1, numbers)
        views[0].of_whole(images, draws)
        views[1].of_cut(images, draws)
        TestView((24, 24), 28).of_whole(images, draws)
        augment.resize_batch(images, (48, 48))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_computes_what_the_cpu_does():
    images, draws = random_bytes(16, 40, 56), some_draws(16)
    assert draw(0, 0, torch.arange(16).cuda()).cpu().equal(draws)
    view = RandomCrop(EVERYTHING, (24, 32))
    ours = view.of_whole(images.cuda(), draws.cuda()).cpu()
    torch.testing.assert_close(ours, view.of_whole(images, draws), atol=1e-2, rtol=0)
