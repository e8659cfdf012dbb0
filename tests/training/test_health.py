"""Health signs measure what they say, and each symptom is reported once until it has disappeared."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_run import tiny_objective

from stop_mim.training.callbacks.health import HealthSigns, WatchHealth, effective_rank, ema_distance, measure_health
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig

HEALTHY = HealthSigns(
    A_norm=2.0,
    mask_token_norm=0.3,
    position_norm=1.5,
    noise_to_signal=0.5,
    feature_std=0.9,
    rankme=20.0,
    rank_limit=48,
    ema_distance=0.01,
)
OBJECTIVES = {
    "ijepa": {},
    "mae": {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")},
    "data2vec": {"objective": ObjectiveConfig("data2vec", target_layers=2), "masks": MaskConfig("blockwise")},
}


@pytest.fixture
def images():
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_effective_rank_is_the_exponential_of_the_entropy_of_the_singular_values():
    # Singular values 3 and 1: p = (3/4, 1/4), and exp of their entropy is 4 / 3 ** (3/4).
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75, rel=1e-3)
    assert effective_rank(torch.zeros(4, 3)) == pytest.approx(1, abs=0.01)
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.inf]])))
    generator = torch.Generator().manual_seed(0)
    for rows, columns, rank in ((200, 48, 48), (40, 300, 7)):
        left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
        features = (left @ right) * torch.logspace(0, -2, columns)
        singular = torch.linalg.svdvals(features.double())
        parts = singular / singular.sum() + 1e-7
        # The Gram matrix halves the digits of what is nearly zero.
        assert effective_rank(features) == pytest.approx(math.exp(-(parts * parts.log()).sum()), rel=1e-3)
        assert effective_rank(features) <= 1.01 * rank


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("ijepa", PositionsConfig(sigma=0.25)),
        ("mae", PositionsConfig(sigma=0.25, convention="release")),
        ("data2vec", PositionsConfig(sigma=0.5, covariance="low_rank(3)")),
    ],
)
def test_signs_are_those_of_weights_features_and_samples(images, kind, positions):
    objective = tiny_objective(positions=positions, **OBJECTIVES[kind])
    masked = objective.masked_tokens
    torch.nn.init.normal_(masked.projection.weight, std=0.3)
    masked.mask_token.data.fill_(0.25)
    modes, state = [module.training for module in objective.modules()], torch.get_rng_state()
    signs = measure_health(objective, images)
    assert [module.training for module in objective.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert signs.A_norm == pytest.approx(masked.projection.weight.norm().item())
    assert signs.mask_token_norm == pytest.approx(0.25 * math.sqrt(masked.mask_token.numel()))
    indices, table = torch.arange(16).repeat(4000, 1), masked.positions.table()
    noise = masked.positions.sample(indices, generator=torch.Generator().manual_seed(0)) - masked.positions.mean(
        indices
    )
    assert signs.position_norm == pytest.approx(table.square().sum(-1).mean().sqrt().item())
    empirical = noise.square().sum(-1).mean().sqrt() / signs.position_norm
    assert signs.noise_to_signal == pytest.approx(empirical.item(), rel=0.02)
    with torch.no_grad():
        features = F.layer_norm(objective.frozen.eval()(images), (24,)).flatten(0, 1)
    assert signs.feature_std == pytest.approx(features.std(0).mean().item(), rel=1e-5)
    assert signs.rankme == pytest.approx(effective_rank(features), rel=1e-5)
    assert signs.rank_limit == 24


@pytest.mark.parametrize("positions", [PositionsConfig(kind="sincos"), PositionsConfig(apply_to="none")])
def test_there_is_no_noise_without_stochastic_positions(images, positions):
    assert measure_health(tiny_objective(positions=positions), images).noise_to_signal == 0


@pytest.mark.parametrize(("kind", "expected"), [("ijepa", 0.5), ("data2vec", 0.5), ("mae", 0.0)])
def test_the_distance_of_the_target_is_relative_and_mae_has_none(kind, expected):
    objective = tiny_objective(**OBJECTIVES[kind])
    for parameter in objective.encoder.parameters():
        parameter.data.mul_(2.0)
    assert ema_distance(objective) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("failing", "just_well", "text"),
    [
        ({"A_norm": 0.19}, {"A_norm": 0.21}, "A is vanishing"),
        ({"mask_token_norm": 7.6}, {"mask_token_norm": 7.4}, "mask token is exploding"),
        ({"noise_to_signal": 3.1}, {"noise_to_signal": 2.9}, "noise is 3.1 times"),
        ({"feature_std": 0.04}, {"feature_std": 0.06}, "Features are collapsing"),
        ({"rankme": 0.9}, {"rankme": 1.0}, "Features are collapsing"),
    ],
)
def test_a_symptom_is_reported_once_until_it_has_disappeared(failing, just_well, text):
    told = []
    health = WatchHealth(tiny_objective(), 10, told.append)
    health.judge(HEALTHY)
    for signs, count in ((failing, 1), (failing, 1), (just_well, 1), (failing, 2), (failing | {"A_norm": 0.0}, 3)):
        health.judge(replace(HEALTHY, **signs))
        assert len(told) == (count if text != "A is vanishing" else min(count, 2))
    assert text in told[0]
    assert "Lower " in told[0]


def test_a_is_compared_with_the_first_step_also_after_a_resume():
    began, told = WatchHealth(tiny_objective(), 10, print), []
    began.judge(replace(HEALTHY, A_norm=100.0))
    resumed = WatchHealth(tiny_objective(), 10, told.append)
    resumed.restore(began.state(), {})
    resumed.judge(HEALTHY)
    assert "A is vanishing: its norm is 2 and was 100" in told[0]
