"""The fast linear probe against scikit-learn on the same features, and its choices without the test set."""

from itertools import chain

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from stop_mim.evaluation.linear import (
    PENALTIES,
    TrainingFeatures,
    choose_penalty,
    fit_linear_probe,
    fit_together,
    linear_probe,
)

CPU = torch.device("cpu")


@pytest.fixture
def clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 20, generator=generator)
    labels = torch.randint(5, (900,), generator=generator)
    features = 3 + 2 * (centres[labels] + 1.3 * torch.randn(900, 20, generator=generator))
    return features[:600], labels[:600], features[600:], labels[600:]


def scikit(features, labels, penalty, scaler):
    reference = LogisticRegression(C=1 / (penalty * len(features)), max_iter=2000, tol=1e-8)
    return reference.fit(scaler.transform(features), labels)


@pytest.mark.parametrize("penalty", [1e-1, 1e-3])
def test_the_probe_is_logistic_regression(clusters, penalty):
    features, labels, test_features, test_labels = clusters
    probe = fit_linear_probe(features, labels, penalty, 5)
    scaler = StandardScaler().fit(features)
    reference = scikit(features, labels, penalty, scaler)
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
    reference = scikit(features[:200], labels[:200], 1e-2, scaler)
    ours = probe.logits(features[200:]).softmax(1).numpy()
    np.testing.assert_allclose(ours, reference.predict_proba(scaler.transform(features[200:])), atol=0.01)


def test_chunks_give_what_all_features_at_once_give(clusters):
    features, labels, test_features, _ = clusters
    whole = TrainingFeatures([features], labels, 5, CPU)
    parts = TrainingFeatures(list(features.half().split(170)), labels, 5, CPU)
    torch.testing.assert_close(parts.mean, whole.mean, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        parts.fit([1e-2])[0].logits(test_features).softmax(1),
        whole.fit([1e-2])[0].logits(test_features).softmax(1),
        atol=5e-3,
        rtol=0,
    )


def test_without_standardisation_only_the_scale_changes(clusters):
    features, labels, test_features, _ = clusters
    stretched = features * torch.linspace(0.1, 10, 20)
    probe = fit_linear_probe(stretched, labels, 1e-3, 5, standardise=False)
    assert probe.std.unique().numel() == 1
    scale = (stretched - stretched.mean(0)).square().mean().sqrt()
    reference = LogisticRegression(C=1 / (1e-3 * 600), max_iter=20_000, tol=1e-8).fit(stretched / scale, labels)
    ours = probe.logits(test_features * torch.linspace(0.1, 10, 20)).softmax(1).numpy()
    theirs = reference.predict_proba(test_features * torch.linspace(0.1, 10, 20) / scale)
    np.testing.assert_allclose(ours, theirs, atol=0.02)


def test_penalties_do_not_touch_one_another(clusters, monkeypatch):
    features, labels, test_features, _ = clusters
    training = TrainingFeatures([features], labels, 5, CPU)
    together = training.fit(PENALTIES)
    monkeypatch.setattr("stop_mim.evaluation.linear.LOGITS_AT_A_TIME", 1000)
    for penalty, probe in zip(PENALTIES[:4], together, strict=False):
        alone = training.fit([penalty])[0].logits(test_features).softmax(1)
        torch.testing.assert_close(probe.logits(test_features).softmax(1), alone, atol=5e-3, rtol=0)


def test_test_features_are_standardised_by_the_training_set(clusters):
    features, labels, test_features, _ = clusters
    probe = fit_linear_probe(features, labels, 1e-2, 5)
    torch.testing.assert_close(probe.logits(test_features)[:1], probe.logits(test_features[:1]))


def run(features, labels, test_features, test_labels, **options):
    sets = ({"last1": [features]}, labels, {"last1": [test_features]}, test_labels, 5, CPU)
    return dict(linear_probe(*sets, **options))


def test_nothing_is_chosen_by_the_test_set(clusters):
    features, labels, test_features, test_labels = clusters
    scores = run(*clusters)
    assert scores["linear/last1+bn/penalty"] == choose_penalty([features], labels, 5, CPU).penalty
    shuffled = run(features, labels, test_features, test_labels.flip(0))
    for name, value in scores.items():
        if name.endswith(("penalty", "held_out")):
            assert shuffled[name] == value
    assert shuffled["linear/top1"] < scores["linear/top1"]


def test_the_headline_is_that_of_the_kind_that_did_best_on_held_out_images(clusters):
    features, labels, test_features, test_labels = clusters
    noise = torch.randn(900, 20, generator=torch.Generator().manual_seed(3))
    # On the test images the useless features are the good ones: they must not be chosen.
    train = {"useful": [features], "useless": [noise[:600]]}
    test = {"useful": [noise[600:]], "useless": [test_features]}
    scores = dict(linear_probe(train, labels, test, test_labels, 5, CPU, standardise=(True,)))
    assert scores["linear/useful+bn/held_out"] > scores["linear/useless+bn/held_out"]
    assert scores["linear/top1"] == scores["linear/useful+bn/top1"]
    assert scores["linear/held_out"] == scores["linear/useful+bn/held_out"]


def test_top5_and_progress(clusters):
    seen = []
    features, labels, test_features, test_labels = clusters
    sets = ({"last1": [features]}, labels, {"last1": [test_features]}, test_labels, 6, CPU)
    scores = dict(linear_probe(*sets, progress=lambda done, total: seen.append((done, total))))
    assert scores["linear/top5"] >= scores["linear/top1"]
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert "linear/top5" not in run(*clusters)  # of five classes the right one is always among the best five


def test_real_features_agree_with_scikit_learn(real_data):
    from stop_mim.data.sources import open_source
    from stop_mim.evaluation.features import pixel_features

    source = open_source(str(real_data("cifar-100")))
    classes = source.labels["class"]
    chosen = np.flatnonzero(classes < 5)[:1600]
    pixels = torch.stack([source.read(int(index))[:, ::4, ::4] for index in chosen])
    features, labels = pixel_features(pixels), torch.from_numpy(classes[chosen])
    probe = fit_linear_probe(features[:1200], labels[:1200], 1e-2, 5)
    scaler = StandardScaler().fit(features[:1200])
    reference = scikit(features[:1200], labels[:1200], 1e-2, scaler)
    theirs = reference.score(scaler.transform(features[1200:]), labels[1200:])
    assert probe.accuracy(features[1200:], labels[1200:]) == pytest.approx(theirs, abs=0.003)


def test_sets_fitted_together_are_fitted_as_each_alone(clusters):
    features, labels, test_features, _ = clusters
    wide = torch.randn(60, 20, generator=torch.Generator().manual_seed(2)) @ torch.randn(20, 20)
    # Other numbers of images and, in the last, of directions with any variance.
    sets = [(features[:150], labels[:150]), (5 * features[200:500], labels[200:500]), (wide[:12], labels[:12])]
    trainings = [TrainingFeatures([inputs], own, 5, CPU) for inputs, own in sets]
    assert len({len(training.curvatures) for training in trainings}) > 1
    penalties = [(1e-1, 1e-3), (1e-2, 1e-3), (1e-1, 1e-2)]
    alone = [training.fit(own) for training, own in zip(trainings, penalties, strict=True)]
    for at_once in (None, 1, 2, 3):
        together = fit_together(trainings, penalties, at_once=at_once)
        for one, other in zip(chain(*alone), chain(*together), strict=True):
            torch.testing.assert_close(
                other.logits(test_features).softmax(1), one.logits(test_features).softmax(1), atol=3e-3, rtol=0
            )


def test_kinds_of_features_can_be_left_out(clusters):
    features, labels, test_features, test_labels = clusters
    scores = dict(linear_probe({"last1": [features]}, labels, {"last1": [test_features]}, test_labels, 5, CPU, (True,)))
    assert {name.split("/")[1] for name in scores} == {"last1+bn", "top1", "penalty", "held_out"}
    assert scores["linear/top1"] == scores["linear/last1+bn/top1"]
