"""The data of tasks: labelled training and test images, or videos, from the names that a user gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.labelled import LabelledSet, hold_out
from stop_mim.data.sources import NoSplit, open_source
from stop_mim.data.videos import Video
from stop_mim.errors import InputError
from stop_mim.files import user_path

TEST_FRACTION = 0.2
FEWEST_OBJECTS = 3
DISTANCE_EDGES = (8.0, 8.5, 9.0, 9.5, 10.0)


@dataclass(frozen=True)
class TaskData:
    """One labelling of the data, with training and test images."""

    label: str
    classes: int
    train: LabelledSet
    test: LabelledSet
    held_out: bool
    """Whether the test images are a part of the training data, because those have no test split."""

    @property
    def test_name(self) -> str:
        return self.test.source.name

    def chance(self) -> float:
        """Return the test accuracy in % of always answering the most frequent class of the training images."""
        return 100 * float(np.mean(self.test.classes == np.bincount(self.train.classes).argmax()))

    def facts(self) -> dict[str, Any]:
        """Return what a result records of the data."""
        return {
            "test_fingerprint": self.test.fingerprint(),
            "train_images": len(self.train),
            "test_images": len(self.test),
            "test_held_out": self.held_out,
            "classes": self.classes,
            "chance": self.chance(),
        }


@dataclass(frozen=True)
class VideoData:
    """Videos with masks of their objects."""

    videos: list[Video]
    test_name: str
    label: ClassVar[str] = "objects"

    def facts(self) -> dict[str, Any]:
        """Return what a result records of the data."""
        return {"data_fingerprint": digest(video.fingerprint() for video in self.videos), "sequences": len(self.videos)}


def kinds_of_data(name: str) -> set[str]:
    """Return whether a name stands for images, videos or, as scenes do, both."""
    if name.partition(":")[0] == "scenes":
        return {"images", "videos"}
    is_davis = bool(name) and any((user_path(name) / part).is_dir() for part in ("JPEGImages", "Annotations"))
    return {"videos"} if is_davis else {"images"}


def count_classes(counts: np.ndarray) -> Int[Tensor, " n"]:
    """Return CLEVR/Count: 3 to 10 objects as classes 0 to 7."""
    return torch.as_tensor(counts, dtype=torch.long) - FEWEST_OBJECTS


def distance_classes(distances: np.ndarray) -> Int[Tensor, " n"]:
    """Return CLEVR/Dist: the distance of the nearest object in six bins, each with its upper edge, as VTAB's."""
    return torch.as_tensor(np.digitize(distances, DISTANCE_EDGES, right=True), dtype=torch.long)


CLASS_MAKERS: Mapping[str, Callable[[np.ndarray], Tensor]] = {"count": count_classes, "distance": distance_classes}


def open_task_data(data: str, test_data: str | None = None, label: str = "auto", seed: int = 0) -> list[TaskData]:
    """Open the images and return all of their labellings, or the one named by `label`."""
    train = open_source(data)
    test = _open_test(data, test_data, train)
    return [_labelled(train, test, name, seed) for name in _choose_labels(train, label)]


def _open_test(data: str, test_data: str | None, train: ImageSource) -> ImageSource | None:
    if test_data is not None:
        return open_source(test_data, "test")
    try:
        test = open_source(data, "test")
    except NoSplit:
        return None
    # A source without splits gives the same images for each.
    return None if test.fingerprint() == train.fingerprint() else test


def _choose_labels(source: ImageSource, label: str) -> list[str]:
    if not source.labels:
        raise InputError(
            f"'{source.name}' has no labels, which this task needs{source.no_labels and f' ({source.no_labels})'}: give a "
            "folder of class sub-folders alone, a parquet file with a label column, or other labelled data."
        )
    if label == "auto":
        return list(source.labels)
    if label not in source.labels:
        raise InputError(f"'{source.name}' has no label '{label}': choose one of {', '.join(source.labels)}.")
    return [label]


def _labelled(train: ImageSource, test: ImageSource | None, label: str, seed: int) -> TaskData:
    classes = _classes(train, label)
    whole = LabelledSet(train, classes, np.arange(len(train)))
    if len(np.unique(classes)) < 2:
        raise InputError(f"All images of '{train.name}' have the same label '{label}': give at least two classes.")
    if test is None:
        part, held = hold_out(whole, TEST_FRACTION, len(train), seed)
        return TaskData(label, int(classes.max()) + 1, part, held, held_out=True)
    if label not in test.labels:
        raise InputError(
            f"The test data '{test.name}' have no label '{label}': give labelled test data with --test-data."
        )
    test_classes = _classes(test, label)
    if label == "class":
        test_classes = _renumbered(test_classes, test, train)
    absent = np.setdiff1d(test_classes, classes)
    if len(absent):
        raise InputError(
            f"The class {class_name(int(absent[0]), train, test)} of the test data '{test.name}' does not occur in the "
            f"training data '{train.name}': give data with the same classes."
        )
    tested = LabelledSet(test, test_classes, np.arange(len(test)))
    return TaskData(label, int(classes.max()) + 1, whole, tested, held_out=False)


def _classes(source: ImageSource, label: str) -> np.ndarray:
    values = source.labels[label]
    return np.asarray(CLASS_MAKERS[label](values) if label in CLASS_MAKERS else values, dtype=np.int64)


def _renumbered(classes: np.ndarray, test: ImageSource, train: ImageSource) -> np.ndarray:
    """Number the test classes as the training data number the same names."""
    if not train.class_names or not test.class_names or train.class_names == test.class_names:
        return classes
    numbers = {name: number for number, name in enumerate(train.class_names)}
    unknown = [name for name in test.class_names if name not in numbers]
    if unknown:
        raise InputError(
            f"The class '{unknown[0]}' of the test data '{test.name}' is not among those of the training data "
            f"'{train.name}': give data with the same classes."
        )
    return np.array([numbers[name] for name in test.class_names])[classes]


def class_name(number: int, *sources: ImageSource) -> str:
    """Return a class by its number and, where one of the sources has it, its name."""
    named = next((source for source in sources if number < len(source.class_names)), None)
    return str(number) if named is None else f"{number} ('{named.class_names[number]}')"
