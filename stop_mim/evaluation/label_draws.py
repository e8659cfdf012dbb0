"""Which images have labels where these are few: those that a list names, or some of each class."""

from functools import partial
from pathlib import Path

import numpy as np

from stop_mim.data.image_lists import draw_fraction, draw_per_class, read_image_list
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.config import LowShotConfig


def label_draws(options: LowShotConfig, data: LabelledSet, seed: int) -> dict[str, list[np.ndarray]]:
    """For each amount of labels the images of each draw, by their numbers in the source."""
    if options.list_file is not None:
        return {"list": [_within(read_image_list(options.list_file, data.source), data.indices, options.list_file)]}
    if options.draws < 1 or not options.amounts:
        raise InputError(f"low_shot.draws is {options.draws}: give at least one draw, and at least one amount.")
    classes = data.classes
    return {
        amount: [data.indices[_draw(amount, classes, seed, draw)] for draw in range(options.draws)]
        for amount in options.amounts
    }


def _draw(amount: str, classes: np.ndarray, seed: int, draw: int) -> np.ndarray:
    try:
        if amount.endswith("%"):
            drawn = partial(draw_fraction, classes, float(amount[:-1]) / 100)
        else:
            drawn = partial(draw_per_class, classes, int(amount))
    except ValueError:
        raise InputError(
            f"low_shot.amounts has '{amount}': give a part such as 1% or images a class such as 5."
        ) from None
    return drawn(seed, draw)


def _within(chosen: np.ndarray, own: np.ndarray, path: Path) -> np.ndarray:
    outside = np.setdiff1d(chosen, own)
    if len(outside):
        raise InputError(
            f"{len(outside)} of the images that {path} names are held out to be tested on: give test images with --test-data."
        )
    return np.sort(chosen)
