"""The measures against DAVIS's own numbers, and against their definitions written pixel by pixel."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_dilation, gaussian_filter
from small_trainings import MemoryVideo

from stop_mim.data.videos import write_mask
from stop_mim.errors import InputError
from stop_mim.evaluation.segmentation import (
    boundary_map,
    contour_accuracy,
    region_similarity,
    score_masks,
    score_videos,
    statistics,
)

NAMES = [f"{letter}_{name}" for letter in "JF" for name in ("mean", "recall", "decay")]


def plain_boundary(mask):
    height, width = mask.shape
    boundary = np.zeros((height, width), dtype=bool)
    for y in range(height):
        for x in range(width):
            neighbours = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if y == height - 1:
                neighbours = neighbours[:1]
            if x == width - 1:
                neighbours = [(y + 1, x)]
            inside = [(b, a) for b, a in neighbours if b < height and a < width]
            boundary[y, x] = any(mask[y, x] != mask[place] for place in inside)
    return boundary


def plain_dilation(boundary, radius):
    """Every pixel of a disk around every pixel of the boundary."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return binary_dilation(boundary, x * x + y * y <= radius * radius)


def plain_contour_accuracy(predicted, truth):
    found, wanted = plain_boundary(predicted), plain_boundary(truth)
    radius = math.ceil(0.008 * math.sqrt(truth.shape[0] ** 2 + truth.shape[1] ** 2))
    if not found.any() or not wanted.any():
        precision, recall = float(not found.any()), float(not wanted.any())
    else:
        precision = (found & plain_dilation(wanted, radius)).sum() / found.sum()
        recall = (wanted & plain_dilation(found, radius)).sum() / wanted.sum()
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def blobs(generator, shape):
    """Smooth random shapes; now and then an empty mask or a full one."""
    field = gaussian_filter(generator.standard_normal(shape), generator.uniform(0.1, 4))
    return field > generator.choice([-9, 0, 0, 0.5 * field.std(), 1.5 * field.std(), 9])


@pytest.mark.parametrize("shape", [(1, 9), (7, 1), (17, 23), (30, 40), (8, 300)])
def test_measures_are_their_definitions(shape):
    generator = np.random.default_rng(sum(shape))
    values = []
    for _ in range(8 if max(shape) > 100 else 20):
        predicted, truth = blobs(generator, shape), blobs(generator, shape)
        np.testing.assert_array_equal(boundary_map(truth), plain_boundary(truth))
        values.append(contour_accuracy(predicted, truth))
        assert values[-1] == plain_contour_accuracy(predicted, truth)
        pixels = {tuple(p) for p in np.argwhere(predicted)}, {tuple(p) for p in np.argwhere(truth)}
        both, either = len(pixels[0] & pixels[1]), len(pixels[0] | pixels[1])
        assert region_similarity(predicted, truth) == (both / either if either else 1)
    assert len(set(values)) > 3 or min(shape) < 3


@pytest.mark.parametrize(
    ("frames", "first", "last"),
    [
        (1, [0], [0]),
        (3, [0, 1], [2]),
        (5, [0, 1], [3, 4]),
        (7, [0, 1, 2], [5, 6]),
        (8, [0, 1, 2], [5, 6, 7]),
        (48, range(13), range(35, 48)),
    ],
)
def test_quarters_share_the_frames_on_their_edges(frames, first, last):
    """Edges 1 + k (n - 1) / 4, counted from one, are rounded half up: these rows were worked out by hand."""
    values = np.random.default_rng(frames).random(frames)
    expected = values[list(first)].mean() - values[list(last)].mean()
    assert statistics(values)["decay"] == pytest.approx(expected, abs=1e-12)


def test_recall_counts_the_frames_above_a_half():
    found = statistics(np.array([0.5, 0.6, 0.2, 1.0]))
    assert found == pytest.approx({"mean": 0.575, "recall": 0.5, "decay": 0.55 - 0.6})


def random_masks(seed, frames, objects, shape=(24, 36)):
    generator = np.random.default_rng(seed)
    masks = []
    for _ in range(frames):
        mask = np.zeros(shape, dtype=np.uint8)
        for number in range(1, objects + 1):
            mask[blobs(generator, shape)] = number
        masks.append(torch.from_numpy(mask))
    masks[0][0, :objects] = torch.arange(1, objects + 1, dtype=torch.uint8)
    return masks


def save(folder, name, masks):
    for index, mask in enumerate(masks):
        write_mask(folder / name / f"{index:05d}.png", mask)


@pytest.fixture
def scored(tmp_path):
    """A video of three objects and one of a single object, with masks that somebody predicted."""
    videos = [MemoryVideo("three", random_masks(0, 12, 3)), MemoryVideo("one", random_masks(1, 9, 1))]
    predictions = {"three": random_masks(2, 12, 3), "one": random_masks(3, 9, 1)}
    for name, masks in predictions.items():
        save(tmp_path, name, masks)
    return videos, predictions, tmp_path


def plain_means(truths, predictions, number):
    """J and F of an object by the definitions above."""
    pairs = [((p == number).numpy(), (t == number).numpy()) for p, t in zip(predictions, truths, strict=True)][1:-1]
    regions = [(p & t).sum() / (p | t).sum() if (p | t).any() else 1 for p, t in pairs]
    return np.mean(regions), np.mean([plain_contour_accuracy(*pair) for pair in pairs])


def test_objects_sequences_and_the_whole(scored):
    videos, predictions, folder = scored
    found = score_masks(videos, folder)
    expected = {
        (video.name, number): plain_means(video.masks, predictions[video.name], number)
        for video in videos
        for number in video.objects
    }
    assert len(expected) == 4
    for (name, number), (region, contour) in expected.items():
        scores = found["sequences"][name]["objects"][str(number)]
        assert scores["J_mean"] == pytest.approx(region, abs=1e-12)
        assert scores["F_mean"] == pytest.approx(contour, abs=1e-12)
    three = [region for (name, _), (region, _) in expected.items() if name == "three"]
    assert found["sequences"]["three"]["J_mean"] == pytest.approx(np.mean(three))
    # Every object counts alike, not every sequence.
    region, contour = np.mean(list(expected.values()), axis=0)
    assert (found["J_mean"], found["F_mean"]) == (pytest.approx(region), pytest.approx(contour))
    assert found["J&F"] == pytest.approx((region + contour) / 2)
    assert region != pytest.approx((np.mean(three) + expected["one", 1][0]) / 2, abs=1e-3)


def test_foreground_merges_the_objects(scored):
    videos, predictions, folder = scored
    found = score_masks(videos[:1], folder, foreground=True)["sequences"]["three"]
    merged = [[mask.gt(0) for mask in masks] for masks in (videos[0].masks, predictions["three"])]
    region, contour = plain_means(*merged, True)
    assert list(found["objects"]) == ["1"]
    assert (found["J_mean"], found["F_mean"]) == (pytest.approx(region), pytest.approx(contour))


def test_the_first_and_the_last_frame_do_not_matter_nor_a_folder_480p(scored):
    videos, _, folder = scored
    expected = score_masks(videos, folder)
    (folder / "three" / "00000.png").write_bytes(b"")
    (folder / "three" / "00011.png").unlink()
    (folder / "480p").mkdir()
    (folder / "three").rename(folder / "480p" / "three")
    assert score_masks(videos, folder) == expected


def objects(video, prediction):
    found = score_videos([video], lambda _: prediction)["sequences"][video.name]["objects"]
    return {number: (one["J_mean"], one["F_mean"]) for number, one in found.items()}


def test_an_object_that_vanishes_is_right_when_nothing_is_found():
    square = torch.zeros(20, 20, dtype=torch.uint8)
    square[5:10, 5:10] = 1
    square[12:17, 5:10] = 2
    gone = square * (square == 1)
    video = MemoryVideo("gone", [square, square, gone, gone, gone])
    assert objects(video, [square, square, gone, gone, None]) == {"1": (1, 1), "2": (1, 1)}
    assert objects(video, [square, square, square, gone, None])["2"] == pytest.approx((2 / 3, 2 / 3))


def test_objects_are_those_of_the_first_mask():
    """A number that turns up later is nobody's, and a gap in the numbers is an object, as in the official code."""
    first = torch.zeros(8, 8, dtype=torch.uint8)
    first[:2], first[6:] = 1, 3
    later = first.clone()
    later[4, 4] = 7
    found = objects(MemoryVideo("gap", [first, later, first]), [first] * 3)
    assert found == {"1": (1, 1), "2": (1, 1), "3": (1, 1)}


def remove_frames(videos, folder):
    for index in (3, 4, 5):
        (folder / "one" / f"{index:05d}.png").unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda videos, folder: (folder / "one").rename(folder / "eins"), "'one': put them into .*one"),
        (remove_frames, "one has no 00003.png and 2 more"),
        (
            lambda videos, folder: write_mask(folder / "one" / "00004.png", videos[1].masks[4][:-1]),
            "00004 of the video 'one' has 36x23 pixels: .* 36x24",
        ),
        (lambda videos, folder: videos[1].masks.__setitem__(2, None), "'one' has no true mask of 00002"),
        (lambda videos, folder: videos[1].masks.__delitem__(slice(2, None)), "'one' has 2 frames"),
        (lambda videos, folder: videos.clear(), "no video"),
    ],
    ids=["no sequence", "no frames", "another size", "no truth", "too short", "nothing"],
)
def test_bad_input_is_refused(scored, damage, sentence):
    videos, _, folder = scored
    damage(videos, folder)
    with pytest.raises(InputError, match=sentence):
        score_masks(videos, folder)


def test_foreign_numbers_and_void_are_foreground_when_merged(scored):
    videos, predictions, folder = scored
    expected = score_masks(videos, folder, foreground=True)
    save(folder, "one", [mask * 255 for mask in predictions["one"]])
    assert score_masks(videos, folder, foreground=True) == expected
    with pytest.raises(InputError, match="has an object 255"):
        score_masks(videos, folder)
