"""Few labels: the penalty by folds, means and deviations over draws."""

import numpy as np
import pytest
import torch

from stop_mim.evaluation import low_shot as low_shot_module
from stop_mim.evaluation.linear import PENALTIES, choose_penalty, fit_linear_probe, fit_together
from stop_mim.evaluation.low_shot import DEFAULT_PENALTY, choose_penalties, choose_penalty_by_folds, low_shot


@pytest.fixture
def clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(7, 30, generator=generator)
    labels = torch.arange(7).repeat(60)
    return centres[labels] + 1.5 * torch.randn(420, 30, generator=generator), labels


def test_mean_and_deviation_are_those_of_the_draws(clusters):
    features, labels = clusters
    draws = [(features[part : part + 70], labels[part : part + 70]) for part in (0, 70, 140)]
    scores = dict(low_shot({"10 a class": draws}, features[210:], labels[210:], 7))
    each = [scores[f"low-shot/10 a class/top1@{draw}"] for draw in range(3)]
    assert scores["low-shot/10 a class/top1"] == pytest.approx(np.mean(each))
    assert scores["low-shot/10 a class/top1_std"] == pytest.approx(np.std(each, ddof=1))
    assert scores["low-shot/10 a class/images"] == 70
    assert scores["low-shot/10 a class/draws"] == 3
    assert min(each) > 40
    penalty = scores["low-shot/10 a class/penalty@0"]
    probe = fit_linear_probe(*draws[0], penalty, 7)
    assert each[0] == pytest.approx(100 * probe.accuracy(features[210:], labels[210:]), abs=0.5)


def test_more_labels_help(clusters):
    features, labels = clusters
    draws = {"2": [(features[:14], labels[:14])], "20": [(features[:140], labels[:140])]}
    scores = dict(low_shot(draws, features[210:], labels[210:], 7))
    assert scores["low-shot/20/top1"] > scores["low-shot/2/top1"] + 5
    assert "low-shot/2/top1_std" not in scores


def test_the_penalty_comes_from_folds_of_the_few(clusters):
    features, labels = clusters
    noise = torch.randn(70, 30, generator=torch.Generator().manual_seed(1))
    assert choose_penalty_by_folds(features[:70], labels[:70], 7).held_out > 0.4
    assert choose_penalty_by_folds(noise, labels[:70], 7).held_out < 0.35
    assert choose_penalty_by_folds(features[:70], labels[:70], 7).penalty in PENALTIES


def test_with_one_image_a_class_nothing_can_be_held_out(clusters):
    features, labels = clusters
    assert choose_penalty_by_folds(features[:7], labels[:7], 7).penalty == DEFAULT_PENALTY


def test_draws_together_choose_what_each_would_alone(clusters, monkeypatch):
    features, labels = clusters
    draws = [(features[part : part + size], labels[part : part + size]) for part, size in ((0, 70), (70, 21), (7, 7))]
    alone = [choose_penalty_by_folds(*draw, 7) for draw in draws]
    assert alone[2].penalty == DEFAULT_PENALTY
    monkeypatch.setattr(
        low_shot_module, "fit_together", lambda trainings, penalties: fit_together(trainings, penalties, at_once=20)
    )
    together = choose_penalties(draws, 7)
    assert [one.penalty for one in together] == [one.penalty for one in alone]
    np.testing.assert_allclose([one.held_out for one in together], [one.held_out for one in alone], atol=0.03)


def test_of_many_labels_one_part_is_held_out_as_by_the_linear_probe(clusters, monkeypatch):
    features, labels = clusters
    monkeypatch.setattr(low_shot_module, "FEW", 100)
    ours = choose_penalty_by_folds(features, labels, 7, seed=3)
    theirs = choose_penalty([features], labels, 7, torch.device("cpu"), seed=3)
    assert ours.penalty == theirs.penalty
    assert ours.held_out == pytest.approx(theirs.held_out)
