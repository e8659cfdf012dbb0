"""Accuracies and their intervals."""

import pytest
import torch

from stop_mim.evaluation.accuracy import accuracy_interval, top_accuracy


def test_the_right_class_among_the_best():
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    labels = torch.tensor([0, 1, 1])
    assert top_accuracy(scores, labels, 1) == pytest.approx(1 / 3)
    assert top_accuracy(scores, labels, 2) == pytest.approx(2 / 3)
    assert top_accuracy(scores, labels, 3) == 1


def test_the_interval_is_wilsons():
    # From the formula by hand: 8 of 10, z = 1.96.
    assert accuracy_interval(80, 10) == pytest.approx((49.02, 94.33), abs=0.01)
    low, high = accuracy_interval(0, 50)
    assert low == 0
    assert 5 < high < 10


def test_the_interval_holds_the_truth_as_often_as_it_says():
    hits = torch.binomial(torch.full((4000,), 400.0), torch.tensor(0.3), generator=torch.Generator().manual_seed(0))
    bounds = [accuracy_interval(float(hit) / 4, 400) for hit in hits]
    assert sum(low <= 30 <= high for low, high in bounds) / 4000 == pytest.approx(0.95, abs=0.012)
