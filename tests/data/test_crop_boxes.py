"""Crop boxes: distributed as torchvision's, inside images of any size, and in their place on others."""

import math

import pytest
import torch
from random_images import RATIO, SCALE, repeated, seeded
from torchvision.transforms import RandomResizedCrop

from stop_mim.data import augment


def measures(boxes: torch.Tensor, height: int, width: int) -> dict[str, torch.Tensor]:
    top, left, h, w = boxes.double().unbind(1)
    return {
        "area": h * w / (height * width),
        "log ratio": (w / h).log(),
        "top": top / height,
        "left": left / width,
        "bottom": (top + h) / height,
    }


def kolmogorov_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    points = torch.cat([first, second]).unique()
    shares = [torch.searchsorted(s.sort().values, points, right=True) / len(s) for s in (first, second)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize("size", [(64, 64), (120, 90), (40, 120), (120, 40)])
def test_boxes_are_distributed_as_torchvisions(size):
    draws = 8000
    torch.manual_seed(1)
    image = torch.empty(1, *size)
    expected = torch.tensor([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(draws)])
    boxes = augment.sample_crop_boxes(repeated(size, draws), SCALE, RATIO, seeded(2))
    # The Kolmogorov-Smirnov bound that equal distributions pass 999 times in 1000.
    bound = math.sqrt(-math.log(0.001 / 2) / 2) * math.sqrt(2 / draws)
    ours, theirs = measures(boxes, *size), measures(expected, *size)
    for name in ours:
        assert kolmogorov_distance(ours[name], theirs[name]) < bound, name
        deviation = math.sqrt(2 / draws) * theirs[name].std().item()
        assert ours[name].mean().item() == pytest.approx(theirs[name].mean().item(), abs=4 * deviation), name


@pytest.mark.parametrize(("size", "central"), [((40, 120), (0, 33, 40, 53)), ((120, 40), (33, 0, 53, 40))])
def test_elongated_images_fall_back_to_the_central_crop(size, central):
    draws = 3000
    torch.manual_seed(3)
    image = torch.empty(1, *size)
    expected = sum(RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) == central for _ in range(draws))
    boxes = augment.sample_crop_boxes(repeated(size, draws), SCALE, RATIO, seeded(4))
    share = (boxes == torch.tensor(central)).all(dim=1).double().mean().item()
    assert expected / draws > 0.2
    assert share == pytest.approx(expected / draws, abs=4 * math.sqrt(2 * 0.25 / draws))


def test_the_fallback_is_the_whole_image_where_its_ratio_is_allowed():
    # A crop of the whole area fits with the image's own ratio alone, give or take the rounding of a pixel.
    boxes = augment.sample_crop_boxes(repeated((1000, 1000), 8), (1.0, 1.0), (0.5, 0.9), seeded())
    assert boxes.equal(torch.tensor([[0, 50, 1000, 900]]).expand(8, 4))
    boxes = augment.sample_crop_boxes(repeated((1000, 700), 200), (1.0, 1.0), (0.5, 2.0), seeded())
    whole = torch.tensor([0, 0, 1000, 700])
    assert (boxes == whole).all(dim=1).sum() > 180
    assert (boxes - whole).abs().max() <= 1


def test_boxes_lie_inside_images_of_any_size():
    sizes = torch.randint(1, 700, (20_000, 2), generator=seeded(5))
    boxes = augment.sample_crop_boxes(sizes, (0.01, 1.0), (0.2, 5.0), seeded(6))
    assert boxes.dtype == sizes.dtype
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


def test_boxes_repeat_with_a_generator_and_differ_between_images_and_calls():
    sizes = repeated((64, 64), 32)
    first = augment.sample_crop_boxes(sizes, SCALE, RATIO, seeded(7))
    assert first.equal(augment.sample_crop_boxes(sizes, SCALE, RATIO, seeded(7)))
    assert len(first.unique(dim=0)) > 25
    assert not augment.sample_crop_boxes(sizes, SCALE, RATIO).equal(augment.sample_crop_boxes(sizes, SCALE, RATIO))


def test_scaled_boxes_stay_inside_and_keep_their_place():
    sizes = torch.randint(1, 3000, (5000, 2), generator=seeded(8))
    boxes = augment.sample_crop_boxes(sizes, (0.01, 1.0), RATIO, seeded(9))
    scaled = augment.scale_boxes(boxes, sizes, (48, 64))
    assert (scaled[:, :2] >= 0).all()
    assert (scaled[:, 2:] >= 1).all()
    assert (scaled[:, :2] + scaled[:, 2:] <= torch.tensor([48, 64])).all()
    exact = boxes[:, :2] * torch.tensor([48, 64]) / sizes
    assert (scaled[:, :2] - exact).abs().max() <= 1
    whole = torch.cat([torch.zeros_like(sizes), sizes], dim=1)
    assert augment.scale_boxes(whole, sizes, (48, 64)).equal(torch.tensor([[0, 0, 48, 64]]).expand(5000, 4))
