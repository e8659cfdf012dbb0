"""Probes against scikit-learn on the same features, and features against the encoder itself."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from stop_mim.data.augment import normalise, resize_batch
from stop_mim.evaluation.clevr import count_classes, distance_classes
from stop_mim.evaluation.features import pixel_features, pooled_features
from stop_mim.evaluation.knn import knn, knn_votes
from stop_mim.evaluation.linear import choose_penalty, fit_linear_probe, linear_probe
from stop_mim.models.encoder import Dimensions, create_encoder


@pytest.fixture
def clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 20, generator=generator)
    labels = torch.randint(5, (900,), generator=generator)
    features = 3 + 2 * (centres[labels] + 1.3 * torch.randn(900, 20, generator=generator))
    return features[:600], labels[:600], features[600:], labels[600:]


@pytest.mark.parametrize("penalty", [1e-1, 1e-3])
def test_linear_probe_is_logistic_regression(clusters, penalty):
    features, labels, test_features, test_labels = clusters
    probe = fit_linear_probe(features, labels, penalty, 5)
    scaler = StandardScaler().fit(features)
    reference = LogisticRegression(C=1 / (penalty * len(features)), max_iter=2000, tol=1e-8)
    reference.fit(scaler.transform(features), labels)
    ours = probe.logits(test_features).softmax(1).numpy()
    np.testing.assert_allclose(ours, reference.predict_proba(scaler.transform(test_features)), atol=0.01)
    assert probe.accuracy(test_features, test_labels) == pytest.approx(
        reference.score(scaler.transform(test_features), test_labels), abs=0.004
    )


def test_more_features_than_images_are_fitted_in_their_span(clusters):
    _, labels, _, _ = clusters
    features = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    probe = fit_linear_probe(features[:200], labels[:200], 1e-2, 5)
    scaler = StandardScaler().fit(features[:200])
    reference = LogisticRegression(C=1 / (1e-2 * 200), max_iter=2000, tol=1e-8)
    reference.fit(scaler.transform(features[:200]), labels[:200])
    ours = probe.logits(features[200:]).softmax(1).numpy()
    np.testing.assert_allclose(ours, reference.predict_proba(scaler.transform(features[200:])), atol=0.01)


def test_test_features_are_standardised_by_the_training_set(clusters):
    features, labels, test_features, _ = clusters
    probe = fit_linear_probe(features, labels, 1e-2, 5)
    together, alone = probe.logits(test_features), probe.logits(test_features[:1])
    torch.testing.assert_close(together[:1], alone)


def test_the_penalty_is_chosen_without_the_test_set(clusters):
    features, labels, test_features, test_labels = clusters
    chosen = dict(linear_probe(*clusters))["linear/penalty"]
    assert chosen == choose_penalty(features, labels, 5)
    shuffled = dict(linear_probe(features, labels, test_features, test_labels.flip(0)))
    assert shuffled["linear/penalty"] == chosen


def test_knn_agrees_with_scikit_learn(clusters):
    features, labels, test_features, test_labels = clusters
    ours = dict(knn(*clusters, neighbours=(1, 20)))
    for k in (1, 20):
        reference = KNeighborsClassifier(
            k, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07)
        ).fit(features, labels)
        assert ours[f"knn/top1@{k}"] == pytest.approx(100 * reference.score(test_features, test_labels), abs=0.4)


def test_votes_do_not_overflow_at_low_temperatures(clusters):
    features, labels, test_features, _ = clusters
    assert torch.isfinite(knn_votes(features, labels, test_features, 5, 5, temperature=1e-4)).all()


def test_pooled_features_are_the_encoders_own():
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(24, 2, 2), image_size=32, patch_size=8).train()
    pixels = torch.randint(0, 255, (7, 3, 40, 40), dtype=torch.uint8)
    features = pooled_features(encoder, pixels, layers=2, batch_size=3)
    assert encoder.training
    images = normalise(resize_batch(pixels, (32, 32)), encoder.mean, encoder.std)
    torch.testing.assert_close(features, encoder.eval().embed(images, 2).detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(pixel_features(pixels)[0], pixels[0].flatten() / 255)


def test_classes_of_counts_and_distances():
    assert count_classes(np.array([3, 10])).tolist() == [0, 7]
    distances = np.array([0.0, 7.99, 8.0, 8.49, 8.5, 9.0, 9.5, 9.99, 10.0, 99.0])
    assert distance_classes(distances).tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]
