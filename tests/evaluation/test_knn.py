"""Nearest neighbours against scikit-learn, however the features are cut into chunks."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from small_trainings import CPU

from stop_mim.evaluation.probes import knn
from stop_mim.models import neighbours
from stop_mim.models.neighbours import nearest, votes


def scores(features, labels, test_features, test_labels, neighbours):
    found = knn([features], labels, [test_features], test_labels, 5, CPU, neighbours)
    return {score.name: score.value for score in found}


def scikit(features, labels, k, temperature=0.07):
    weights = lambda distances: np.exp((1 - distances) / temperature)  # noqa: E731
    return KNeighborsClassifier(k, metric="cosine", weights=weights, algorithm="brute").fit(features, labels)


def test_votes_agree_with_scikit_learn(clusters):
    features, labels, test_features, test_labels = clusters
    ours, mean = scores(*clusters, (1, 20)), features.mean(0)
    for k in (1, 20):
        plain = scikit(features, labels, k).score(test_features, test_labels)
        assert ours[f"neighbours={k}/top1"] == pytest.approx(100 * plain, abs=1e-4)
        centred = scikit(features - mean, labels, k).score(test_features - mean, test_labels)
        assert ours[f"centred/neighbours={k}/top1"] == pytest.approx(100 * centred, abs=1e-4)
    assert ours["centred/neighbours=20/top1"] != ours["neighbours=20/top1"]


def test_chunks_and_blocks_change_nothing(clusters, monkeypatch):
    features, _, queries, _ = clusters
    whole = nearest([features], queries, 30)
    monkeypatch.setattr(neighbours, "KEYS_AT_A_TIME", 37)
    cosines, numbers = nearest(list(features.split(250)), queries, 30)
    torch.testing.assert_close(cosines, whole[0])
    assert torch.equal(numbers, whole[1])


def test_more_neighbours_than_images_are_all_of_them(clusters):
    features, labels, *test = clusters
    found = scores(features[:7], labels[:7], *test, (5, 100, 200))
    assert {name for name in found if "centred" not in name} == {"neighbours=5/top1", "neighbours=7/top1"}


def test_votes_do_not_overflow_at_low_temperatures(clusters):
    features, labels, test_features, _ = clusters
    cosines, numbers = nearest([features], test_features, 5)
    assert torch.isfinite(votes(cosines, labels[numbers], 5, temperature=1e-4)).all()
