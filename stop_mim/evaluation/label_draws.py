"""Which images have labels where these are few: those that a list names, or some of each class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stop_mim.data.image_lists import draw_fraction, draw_per_class, read_image_list
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.config import LowShotConfig
from stop_mim.evaluation.task_data import TaskData, class_name


def label_draws(options: LowShotConfig, data: LabelledSet, seed: int) -> dict[str, list[np.ndarray]]:
    """For each amount of labels the images of each draw, by their numbers in the source."""
    if options.list_file is not None:
        return {"list": [_within(read_image_list(options.list_file, data.source), data.indices, options.list_file)]}
    if options.draws < 1 or not options.amounts:
        raise InputError(f"low_shot.draws is {options.draws}: give at least one draw, and at least one amount.")
    classes, names = data.classes, data.source.class_names
    return {
        amount: [data.indices[_draw(amount, classes, names, seed, draw)] for draw in range(options.draws)]
        for amount in options.amounts
    }


def check_label_draws(options: LowShotConfig, data: TaskData, seed: int) -> None:
    """Complain of amounts or a list that do not fit the data, before anything is computed with them."""
    (first, *_), *_ = label_draws(options, data.train, seed).values()
    absent = np.setdiff1d(data.test.classes, data.train.labels[first])
    if options.list_file is not None and len(absent):
        name = class_name(int(absent[0]), data.train.source, data.test.source)
        raise InputError(
            f"{options.list_file} names no image of the class {name}, which the test data have: name one of every class."
        )


def _draw(amount: str, classes: np.ndarray, names: Sequence[str], seed: int, draw: int) -> np.ndarray:
    try:
        number = float(amount[:-1]) / 100 if amount.endswith("%") else int(amount)
    except ValueError:
        number = 0
    if isinstance(number, float) and 0 < number <= 1:
        return draw_fraction(classes, number, seed, draw)
    if isinstance(number, int) and number > 0:
        return draw_per_class(classes, number, seed, draw, names)
    raise InputError(
        f"low_shot.amounts has '{amount}': give a part such as 1%, up to 100%, or images a class such as 5."
    )


def _within(chosen: np.ndarray, own: np.ndarray, path: Path) -> np.ndarray:
    outside = np.setdiff1d(chosen, own)
    if len(outside):
        raise InputError(
            f"{len(outside)} of the images that {path} names are held out to be tested on: give test images with --test-data."
        )
    return np.sort(chosen)
