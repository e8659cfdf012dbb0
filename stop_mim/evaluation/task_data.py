"""Labelled images to learn from and others to be tested on, from the names that a user gives."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stop_mim.data.image_source import ImageSource
from stop_mim.data.labelled import LabelledSet, hold_out
from stop_mim.data.sources import open_source
from stop_mim.data.splits import NoSplit
from stop_mim.errors import InputError
from stop_mim.evaluation.clevr import count_classes, distance_classes

HELD_OUT_TEST_PART = 0.2


@dataclass(frozen=True)
class TaskData:
    """One labelling of the data: which classes, and which images are for training and for testing."""

    label: str
    classes: int
    train: LabelledSet
    test: LabelledSet
    held_out: bool
    """Whether the test images are a part of the training data, because those have no test split."""


def open_task_data(data: str, test_data: str | None = None, label: str = "auto", seed: int = 0) -> list[TaskData]:
    """The labellings that the data have, or the one that is asked for."""
    if not data:
        raise InputError("data is not given: add --data with a folder, a parquet file or another name of a data set.")
    train = open_source(data)
    test = _open_test(data, test_data, train)
    labels = _choose_labels(train, label)
    found = [_labelled(train, test, name, seed) for name in labels]
    for one in found:
        if len(np.unique(one.train.classes)) < 2:
            raise InputError(
                f"All images of '{train.name}' have the same label '{one.label}', so that there is nothing to tell apart: "
                "give data of at least two classes."
            )
    return found


def _open_test(data: str, test_data: str | None, train: ImageSource) -> ImageSource | None:
    if test_data is not None:
        return open_source(test_data, "test")
    try:
        test = open_source(data, "test")
    except NoSplit:
        return None
    # A name without splits of its own is the same images for each.
    return None if test.fingerprint() == train.fingerprint() else test


def _choose_labels(source: ImageSource, label: str) -> list[str]:
    if not source.labels:
        raise InputError(
            f"'{source.name}' has no labels, which this evaluation needs: give a folder of class sub-folders, a parquet file "
            "whose label column has a whole number or a name for every image, or other labelled data."
        )
    if label == "auto":
        return list(source.labels)
    if label not in source.labels:
        raise InputError(f"'{source.name}' has no label '{label}': choose one of {', '.join(source.labels)}.")
    return [label]


def _labelled(train: ImageSource, test: ImageSource | None, label: str, seed: int) -> TaskData:
    classes = _classes(train, label)
    whole = LabelledSet(train, classes, np.arange(len(train)))
    if test is None:
        part, held = hold_out(whole, HELD_OUT_TEST_PART, len(train), seed)
        return TaskData(label, int(classes.max()) + 1, part, held, held_out=True)
    if label not in test.labels:
        raise InputError(
            f"The test data '{test.name}' have no label '{label}': give labelled test data with --test-data."
        )
    test_classes = _renumbered(_classes(test, label), test, train) if label == "class" else _classes(test, label)
    absent = sorted(set(test_classes.tolist()) - set(classes.tolist()))
    if absent:
        name = class_name(absent[0], train, test)
        raise InputError(
            f"The class {name} of the test data '{test.name}' does not occur in the training data '{train.name}': give data "
            "with the same classes."
        )
    tested = LabelledSet(test, test_classes, np.arange(len(test)))
    return TaskData(label, int(classes.max()) + 1, whole, tested, held_out=False)


def _classes(source: ImageSource, label: str) -> np.ndarray:
    makers: Mapping[str, object] = {"count": count_classes, "distance": distance_classes}
    values = source.labels[label]
    maker = makers.get(label)
    return np.asarray(maker(values) if callable(maker) else values, dtype=np.int64)


def _renumbered(classes: np.ndarray, test: ImageSource, train: ImageSource) -> np.ndarray:
    """The classes of the test set by the numbers that the training set gives to the same names."""
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
    """A class by its number, and by its name where one of the sources has it."""
    named = next((source for source in sources if number < len(source.class_names)), None)
    return str(number) if named is None else f"{number} ('{named.class_names[number]}')"
