"""Logistic regression against scikit-learn on the same features; choices without the test set; few labels."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from small_trainings import CPU, coloured, feature_scores, make_task, small_encoder

from stop_mim.evaluation import logistic
from stop_mim.evaluation.features import LabelledFeatures
from stop_mim.evaluation.logistic import (
    DEFAULT_PENALTY,
    LOW_SHOT_PENALTIES,
    PENALTIES,
    STEPS,
    TrainingFeatures,
    choose_penalties,
    choose_penalty,
    fit_stacked,
)
from stop_mim.evaluation.subject import feature_task
from stop_mim.models.accuracy import top_accuracy


def fit(features, labels, penalty, standardise=True):
    return TrainingFeatures([features], labels, 5, CPU, standardise).fit([penalty])[0]


def scikit(features, labels, penalty, iterations=2000):
    return LogisticRegression(C=1 / (penalty * len(features)), max_iter=iterations, tol=1e-8).fit(features, labels)


def probabilities(probe, features):
    return probe.logits(features).softmax(1).numpy()


@pytest.mark.parametrize("penalty", [1e-1, 1e-3])
def test_the_probe_is_logistic_regression(clusters, penalty):
    features, labels, test_features, _ = clusters
    probe, scaler = fit(features, labels, penalty), StandardScaler().fit(features)
    reference = scikit(scaler.transform(features), labels, penalty)
    # The test features are standardised by the training set, one by one or together.
    theirs = reference.predict_proba(scaler.transform(test_features))
    np.testing.assert_allclose(probabilities(probe, test_features), theirs, atol=0.01)
    np.testing.assert_allclose(probabilities(probe, test_features[:1]), theirs[:1], atol=0.01)


def test_more_features_than_images_are_fitted_in_their_span(clusters):
    labels = clusters[1]
    features = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))
    scaler = StandardScaler().fit(features[:200])
    reference = scikit(scaler.transform(features[:200]), labels[:200], 1e-2)
    ours = probabilities(fit(features[:200], labels[:200], 1e-2), features[200:])
    np.testing.assert_allclose(ours, reference.predict_proba(scaler.transform(features[200:])), atol=0.01)


def test_without_standardisation_only_the_scale_changes(clusters):
    features, labels, test_features, _ = clusters
    stretch = torch.linspace(0.1, 10, 20)
    probe = fit(features * stretch, labels, 1e-3, standardise=False)
    assert probe.std.unique().numel() == 1
    scale = (features * stretch - (features * stretch).mean(0)).square().mean().sqrt()
    theirs = scikit(features * stretch / scale, labels, 1e-3, 20_000).predict_proba(test_features * stretch / scale)
    np.testing.assert_allclose(probabilities(probe, test_features * stretch), theirs, atol=0.02)


def test_the_weakest_penalties_converge(clusters):
    """Also where the classes can be separated, and the loss at the optimum is a thousandth of that at the start."""
    features, labels, _, _ = clusters
    features, labels = features[:90], labels[:90]
    scaled = StandardScaler().fit_transform(features)

    def loss(weight, bias, penalty):
        logits = torch.as_tensor(scaled) @ torch.as_tensor(weight).double().T + torch.as_tensor(bias).double()
        norm = penalty / 2 * torch.as_tensor(weight).double().square().sum()
        return float(torch.nn.functional.cross_entropy(logits, labels) + norm)

    penalties = (10.0, 1e-5, 1e-6, 2e-7)
    probes = TrainingFeatures([features], labels, 5, CPU).fit(penalties)
    for penalty, probe in zip(penalties, probes, strict=True):
        reference = scikit(scaled, labels, penalty, 20_000)
        best = loss(reference.coef_, reference.intercept_, penalty)
        assert best < loss(probe.weight, probe.bias, penalty) * (1 + 1e-6)
        assert loss(probe.weight, probe.bias, penalty) < 1.002 * best
    assert best < 1e-3 * np.log(5)


def test_chunks_and_other_penalties_change_nothing(clusters, monkeypatch):
    features, labels, test_features, _ = clusters
    whole = TrainingFeatures([features], labels, 5, CPU)
    together = whole.fit(PENALTIES)
    monkeypatch.setattr(logistic, "LOGITS_AT_A_TIME", 1000)
    chunked = TrainingFeatures(list(features.half().split(170)), labels, 5, CPU)
    for training in (whole, chunked):
        for penalty, probe in zip(PENALTIES[:3], together, strict=False):
            alone = probabilities(training.fit([penalty])[0], test_features)
            np.testing.assert_allclose(probabilities(probe, test_features), alone, atol=7e-3)


def test_sets_fitted_together_are_fitted_as_each_alone(clusters):
    features, labels, test_features, _ = clusters
    # Other numbers of images and, in the last, of directions with any variance.
    sets = [(features[:150], labels[:150]), (5 * features[200:500], labels[200:500]), (features[:12], labels[:12])]
    trainings = [TrainingFeatures([inputs], own, 5, CPU) for inputs, own in sets]
    assert len({len(training.variances) for training in trainings}) > 1
    penalties = [(1e-1, 1e-3), (1e-2, 1e-3), (1e-1, 1e-2)]
    for training, own, together in zip(trainings, penalties, fit_stacked(trainings, penalties), strict=True):
        for one, other in zip(training.fit(own), together, strict=True):
            np.testing.assert_allclose(
                probabilities(other, test_features), probabilities(one, test_features), atol=3e-3
            )


def test_the_search_ends_when_nothing_improves(clusters):
    steps = []
    TrainingFeatures([clusters[0]], clusters[1], 5, CPU).fit([1.0], lambda *step: steps.append(step))
    assert steps[0] == (1, STEPS)
    assert len(steps) < 100


# The task linear


def test_nothing_is_chosen_by_the_test_set(clusters):
    features, labels, test_features, test_labels = clusters
    scores = feature_scores("linear", *clusters, standardise=(True,))
    assert scores["last1/batch_norm/penalty"].value == choose_penalty([features], labels, 5, CPU).penalty
    shuffled = feature_scores("linear", features, labels, test_features, test_labels.flip(0), standardise=(True,))
    for name, score in scores.items():
        if score.metric in ("penalty", "held_out_top1"):
            assert shuffled[name] == score
    assert shuffled["top1"].value < scores["top1"].value


def test_held_out_images_choose_the_kind_of_features(clusters):
    features, labels, test_features, test_labels = clusters
    noise = torch.randn(900, 20, generator=torch.Generator().manual_seed(3))
    # The layer before the last tells the classes, but wrong ones of the test images: there the last layer alone is better.
    train, test = torch.cat([features, noise[:600]], 1), torch.cat([test_features, noise[600:]], 1)
    scores = feature_scores("linear", train, labels, test, (test_labels + 1) % 5, layers=2, standardise=(True,))
    assert set(scores) == {
        f"{kind}{metric}"
        for kind in ("", "last1/batch_norm/", "last2/batch_norm/")
        for metric in ("top1", "penalty", "held_out_top1")
    }
    assert scores["last1/batch_norm/top1"].value > scores["last2/batch_norm/top1"].value
    for metric in ("top1", "held_out_top1"):
        assert scores[metric].value == scores[f"last2/batch_norm/{metric}"].value
    assert [name for name, score in scores.items() if score.headline] == ["top1"]


def test_top5_and_progress(clusters):
    seen = []
    scores = feature_scores("linear", *clusters, classes=6, progress=lambda done, total: seen.append((done, total)))
    assert scores["top5"].value >= scores["top1"].value
    assert scores["top5"].high <= 100
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    fewer = [part[:50] for part in clusters]
    # Of five classes, the right one is always among the best five.
    assert "top5" not in feature_scores("linear", *fewer, standardise=(True,))


# The task low-shot


@pytest.fixture
def few():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(7, 30, generator=generator)
    labels = torch.arange(7).repeat(60)
    return centres[labels] + 1.5 * torch.randn(420, 30, generator=generator), labels


def few_scores(draws, features, labels):
    """Scores of draws of the first half of the images, tested on the others."""
    task = feature_task("low-shot", 7)
    task.draws = {"10": [np.asarray(draw) for draw in draws]}
    train, test = (LabelledFeatures.in_memory(features[part], labels[part]) for part in (slice(210), slice(210, None)))
    return {score.name: score for score in task.scores(train, test)}


def test_mean_and_deviation_are_those_of_the_draws(few, monkeypatch):
    monkeypatch.setattr(logistic, "FOLDS", 2)
    monkeypatch.setattr(logistic, "LOW_SHOT_PENALTIES", (1.0, 1e-2))
    features, labels = few
    scores = few_scores([range(70), range(70, 140), range(140, 210)], *few)
    each = [scores[f"10/draw={draw}/top1"].value for draw in range(3)]
    assert scores["10/top1"].value == pytest.approx(np.mean(each))
    assert scores["10/top1"].std == pytest.approx(np.std(each, ddof=1))
    assert scores["10/images"].value == 70
    probe = TrainingFeatures([features[:70]], labels[:70], 7, CPU).fit([scores["10/draw=0/penalty"].value])[0]
    assert each[0] == pytest.approx(top_accuracy(probe.logits(features[210:]), labels[210:]), abs=0.5)
    single = few_scores([range(14)], *few)["10/top1"]
    assert single.value < min(each)
    assert (single.std, single.low < single.value < single.high) == (None, True)


def test_a_fraction_that_cannot_be_drawn_is_noted():
    task = make_task("low-shot", small_encoder(), coloured(240, 6), coloured(6, 6), amounts=("1%", "10%", "1"))
    (note,) = task.notes()
    assert note.startswith("1% of 240 images are 6 here (2.5%)")


def test_the_penalty_comes_from_folds_of_the_few(few, monkeypatch):
    assert (max(LOW_SHOT_PENALTIES), min(LOW_SHOT_PENALTIES)) == (10, 1e-6)
    monkeypatch.setattr(logistic, "FOLDS", 3)
    monkeypatch.setattr(logistic, "LOW_SHOT_PENALTIES", (1.0, 1e-2, 1e-4))
    features, labels = few
    draws = [(features[part : part + size], labels[part : part + size]) for part, size in ((0, 70), (70, 21), (7, 7))]
    noise = torch.randn(70, 30, generator=torch.Generator().manual_seed(1)), labels[:70]
    chosen = choose_penalties([*draws, noise], 7, seed=0)
    assert chosen[0].penalty in LOW_SHOT_PENALTIES
    assert chosen[0].held_out > 40 > 35 > chosen[3].held_out
    # With one image per class nothing can be held out.
    assert chosen[2].penalty == DEFAULT_PENALTY
    monkeypatch.setattr(logistic, "fit_together", fit_stacked)
    together = choose_penalties(draws, 7, seed=0)
    assert [one.penalty for one in together] == [one.penalty for one in chosen[:3]]
    np.testing.assert_allclose([one.held_out for one in together], [one.held_out for one in chosen[:3]], atol=3)


def test_of_many_labels_one_part_is_held_out_as_by_the_linear_probe(few, monkeypatch):
    monkeypatch.setattr(logistic, "MOST_FOLDED", 100)
    monkeypatch.setattr(logistic, "LOW_SHOT_PENALTIES", PENALTIES)
    (ours,), theirs = choose_penalties([few], 7, seed=3), choose_penalty([few[0]], few[1], 7, CPU, seed=3)
    assert ours.penalty == theirs.penalty
    assert ours.held_out == pytest.approx(theirs.held_out)
