"""Nearest neighbours against scikit-learn, however the features are cut into chunks."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from small_trainings import feature_scores

from stop_mim.models import neighbours
from stop_mim.models.neighbours import knn_votes


def scikit(features, labels, k, temperature=0.07):
    weights = lambda distances: np.exp((1 - distances) / temperature)  # noqa: E731
    return KNeighborsClassifier(k, metric="cosine", weights=weights, algorithm="brute").fit(features, labels)


def test_scores_agree_with_scikit_learn(clusters):
    features, labels, test_features, test_labels = clusters
    ours = feature_scores("knn", *clusters, neighbours=(20, 1))
    for k in (1, 20):
        theirs = scikit(features, labels, k).score(test_features, test_labels)
        assert ours[f"neighbours={k}/top1"].value == pytest.approx(100 * theirs, abs=1e-4)
    assert [name for name, score in ours.items() if score.headline] == ["neighbours=20/top1"]


def test_chunks_and_blocks_change_nothing(clusters, monkeypatch):
    features, labels, queries, _ = clusters
    whole, seen = knn_votes([features], labels, queries, [30, 3], 5), []
    monkeypatch.setattr(neighbours, "KEYS_AT_A_TIME", 37)
    monkeypatch.setattr(neighbours, "QUERIES_AT_A_TIME", 110)
    chunks = list(features.split(250))
    parts = knn_votes(chunks, labels, queries, [30, 3], 5, progress=lambda *step: seen.append(step))
    for k, votes in whole.items():
        torch.testing.assert_close(parts[k], votes)
    assert seen == [(110, 300), (220, 300), (300, 300)]


def test_more_neighbours_than_images_are_all_of_them(clusters):
    features, labels, *test = clusters
    found = feature_scores("knn", features[:7], labels[:7], *test, neighbours=(5, 100, 200))
    assert {*found} == {"neighbours=5/top1", "neighbours=7/top1"}


def test_votes_do_not_overflow_at_low_temperatures(clusters):
    features, labels, test_features, _ = clusters
    assert torch.isfinite(knn_votes([features], labels, test_features, [5], 5, temperature=1e-4)[5]).all()
