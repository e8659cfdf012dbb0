"""DAVIS's metrics of video object segmentation: region similarity J, contour accuracy F, and their statistics.

Every object of a video has the same weight; first and last frame are not scored. The numbers are those of DAVIS's code.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, UInt8
from scipy.spatial import KDTree
from torch import Tensor

from stop_mim.data.stored import Progress
from stop_mim.data.videos import Video, read_mask
from stop_mim.errors import InputError

# A fraction of the image's diagonal: contours that are no further apart than this agree.
TOLERANCE = 0.008

BinaryMask = Bool[np.ndarray, "height width"]
Mask = UInt8[Tensor, "height width"]
Predict = Callable[[Video], Iterable[Mask | None]]
"""Returns the masks of a video, one per frame; those of the first and the last frame may be None."""


VideoScores = dict[str, Any]
"""Means over all objects ("J&F", "J_mean", …, "F_decay"), and "sequences": the same for each, its "n" scored frames and
its "objects"."""


def region_similarity(predicted: BinaryMask, truth: BinaryMask) -> float:
    """Return J: intersection over union; two empty masks agree."""
    union = np.count_nonzero(predicted | truth)
    return np.count_nonzero(predicted & truth) / union if union else 1.0


def boundary_map(mask: BinaryMask) -> BinaryMask:
    """Return the pixels that differ from their right, lower or lower right neighbour.

    As in DAVIS, the last row is compared to the right alone, the last column down alone, and the corner not at all.
    """
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    return (mask != padded[:-1, 1:]) | (mask != padded[1:, :-1]) | (mask != padded[1:, 1:])


def contour_accuracy(predicted: BinaryMask, truth: BinaryMask) -> float:
    """Return F: the harmonic mean of the fractions of either contour that are near the other one.

    A mask that is empty or fills the image has no contour: two of them score 1, one of them 0.
    """
    found, wanted = np.argwhere(boundary_map(predicted)), np.argwhere(boundary_map(truth))
    if not len(found) or not len(wanted):
        return float(len(found) == len(wanted))
    distance = math.ceil(TOLERANCE * math.hypot(*truth.shape))
    precision, recall = _fraction_near(found, wanted, distance), _fraction_near(wanted, found, distance)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _fraction_near(points: np.ndarray, others: np.ndarray, distance: int) -> float:
    # The same as dilating the other contour by a disk. Coordinates are whole numbers, so that the comparison is exact.
    nearest, _ = KDTree(others).query(points)
    return np.count_nonzero(nearest <= distance) / len(points)


def statistics(values: Float64[np.ndarray, " frames"]) -> dict[str, float]:
    """Return mean, recall (frames above a half) and decay (the first quarter's mean minus the last one's).

    The edges of the quarters are rounded half up, and a frame on an edge belongs to both of its quarters.
    """
    last = len(values) - 1
    first_quarter, last_quarter = values[: (last + 2) // 4 + 1], values[(3 * last + 2) // 4 :]
    recall = np.count_nonzero(values > 0.5) / len(values)
    decay = float(first_quarter.mean()) - float(last_quarter.mean())
    return {"mean": float(values.mean()), "recall": recall, "decay": decay}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def score_videos(
    videos: Sequence[Video], predict: Predict, foreground: bool = False, progress: Progress | None = None
) -> VideoScores:
    """Score the predicted masks of each video; with `foreground` all objects of a video are one."""
    if not videos:
        raise InputError("There is no video to score: give at least one.")
    for video in videos:
        _require_truth(video)
    total, done, sequences = sum(map(len, videos)), 0, {}
    for video in videos:
        frames = []
        for index, prediction in zip(range(len(video)), predict(video), strict=True):
            if 0 < index < len(video) - 1:
                frames.append(_score_frame(video, index, prediction, foreground))
            done += 1
            if progress is not None:
                progress(done, total)
        sequences[video.name] = _summarise(np.array(frames))
    means = _means([one for sequence in sequences.values() for one in sequence["objects"].values()])
    return {"J&F": (means["J_mean"] + means["F_mean"]) / 2, **means, "sequences": sequences}


def score_masks(
    videos: Sequence[Video], folder: Path, foreground: bool = False, progress: Progress | None = None
) -> VideoScores:
    """Score the masks folder/SEQUENCE/00000.png …, or those in folder/480p/SEQUENCE."""
    folders = {video.name: _mask_folder(video, folder) for video in videos}
    return score_videos(videos, lambda video: _read_masks(video, folders[video.name]), foreground, progress)


def _require_truth(video: Video) -> None:
    if len(video) < 3:
        raise InputError(
            f"The video '{video.name}' has {len(video)} frames: give at least 3, as the first and the last are not scored."
        )
    if missing := [video.frame_name(index) for index in range(1, len(video) - 1) if not video.has_mask(index)]:
        raise InputError(
            f"The video '{video.name}' has no true mask of {_some(missing)}: choose a split whose masks are published."
        )


def _mask_folder(video: Video, folder: Path) -> Path:
    found = next((path for path in (folder / video.name, folder / "480p" / video.name) if path.is_dir()), None)
    if found is None:
        raise InputError(f"{folder} has no masks of the video '{video.name}': put them into {folder / video.name}.")
    names = [f"{video.frame_name(index)}.png" for index in range(1, len(video) - 1)]
    if missing := [name for name in names if not (found / name).is_file()]:
        raise InputError(f"{found} has no {_some(missing)}: give a mask for every frame but the first and the last.")
    return found


def _read_masks(video: Video, folder: Path) -> Iterator[Mask | None]:
    for index in range(len(video)):
        scored = 0 < index < len(video) - 1
        yield read_mask(folder / f"{video.frame_name(index)}.png") if scored else None


def _score_frame(
    video: Video, index: int, prediction: Mask | None, foreground: bool
) -> Float64[np.ndarray, "objects 2"]:
    """Return J and F of every object."""
    truth = video.mask(index)
    assert truth is not None
    assert prediction is not None
    where = f"The predicted mask {video.frame_name(index)} of the video '{video.name}'"
    if prediction.shape != truth.shape:
        (height, width), (true_height, true_width) = prediction.shape, truth.shape
        raise InputError(
            f"{where} has {width}x{height} pixels: give it the size of the true one, {true_width}x{true_height}."
        )
    predicted, true = prediction.numpy(), truth.numpy()
    if foreground:
        pairs = [(predicted > 0, true > 0)]
    elif (highest := predicted.max()) > len(video.objects):
        raise InputError(
            f"{where} has an object {highest}, and the video has objects 1 to {len(video.objects)}: number them as the "
            "first true mask does, or score all of them as one foreground."
        )
    else:
        pairs = [(predicted == number, true == number) for number in video.objects]
    return np.array([(region_similarity(*pair), contour_accuracy(*pair)) for pair in pairs])


def _summarise(values: Float64[np.ndarray, "frames objects 2"]) -> dict[str, Any]:
    objects = {
        str(number): {
            f"{letter}_{name}": value
            for place, letter in enumerate("JF")
            for name, value in statistics(scores[:, place]).items()
        }
        for number, scores in enumerate(values.swapaxes(0, 1), start=1)
    }
    return {**_means([*objects.values()]), "n": len(values), "objects": objects}


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
