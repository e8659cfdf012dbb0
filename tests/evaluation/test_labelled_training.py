"""What evaluations that train on labelled images share: accuracies of what can be read, and sets that fit together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_trainings import ALONE, SPEED, InMemory

from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.labelled_training import accuracies, check_sets


@pytest.mark.parametrize("together", [True, False])
def test_accuracies_are_of_the_images_that_can_be_read(encoder, together):
    # Grey images, whose brightness is their class; the prediction is off by one for classes above 11.
    levels = torch.arange(12).repeat(10)
    pixels = (levels * 20).to(torch.uint8)[:, None, None, None].repeat(1, 3, 16, 16)
    bad = () if together else (13,)
    data = LabelledSet(InMemory(pixels, bad, together), levels.numpy(), np.arange(120))

    def predict(images):
        grey = (images[:, 0, 0, 0] * encoder.std[0] + encoder.mean[0]) * 255 / 20
        near = -(grey[:, None] - torch.arange(12)).abs()
        later = -(grey[:, None] - torch.arange(12) - 3.1).abs()  # The class is fourth or, at the border, later.
        broken = torch.full_like(near, torch.nan)
        return torch.stack([near, -near, later, broken])

    scores = accuracies(predict, 4, data, encoder, "resize", ALONE, replace(SPEED, batch_size_per_device=7))
    count = len(data) - len(bad)
    expected = []
    for offset in (-3.1, None):
        order = [sorted(range(12), key=lambda c, level=level: abs(level - c + (offset or 0))) for level in range(12)]
        places = [order[level].index(level) for index, level in enumerate(levels.tolist()) if index not in bad]
        expected.append([100 * sum(place < top for place in places) / count for top in (1, 5)])
    assert scores[2].tolist() == pytest.approx(expected[0], rel=1e-5)
    assert scores[0].tolist() == pytest.approx(expected[1]) == [100, 100]
    assert scores[1].tolist() == [0, 0]
    assert scores[3].tolist() == [0, 0]


def test_sets_that_cannot_be_told_apart_are_refused(sets):
    train, test = sets
    without = train.part(np.flatnonzero(train.labels != 2))
    with pytest.raises(InputError, match="Class 2 of the test set 'toy' has no image in the training set 'toy'"):
        check_sets(without, test)
    with pytest.raises(InputError, match="have class 1: give two classes or more"):
        check_sets(train.part(np.flatnonzero(train.labels == 1)), test)
    check_sets(train, without)
