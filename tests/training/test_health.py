"""Health signs measure what they say, and each failure is told exactly once until it has gone."""

import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from tiny_run import tiny_objective

from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig
from stop_mim.training.health import HealthMonitor, HealthSigns, effective_rank, ema_distance, measure_health

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


OTHERS = {
    "mae": {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")},
    "data2vec": {"objective": ObjectiveConfig("data2vec", target_layers=2), "masks": MaskConfig("blockwise")},
}


@pytest.fixture
def images():
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_effective_rank_of_an_isotropic_matrix_is_its_width():
    orthogonal = torch.linalg.qr(torch.randn(40, 12, generator=torch.Generator().manual_seed(0))).Q
    assert effective_rank(orthogonal) == pytest.approx(12, rel=1e-3)
    assert effective_rank(7 * orthogonal) == pytest.approx(12, rel=1e-3)


def test_effective_rank_of_one_direction_is_one():
    assert effective_rank(torch.ones(30, 1) @ torch.arange(1.0, 9.0)[None]) == pytest.approx(1, rel=1e-3)


def test_effective_rank_is_the_exponential_of_the_entropy():
    # Singular values 3 and 1: p = (3/4, 1/4), and exp of their entropy is 4 / 3 ** (3/4).
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75, rel=1e-3)
    assert effective_rank(torch.zeros(4, 3)) == pytest.approx(1, abs=0.01)


def rank_by_singular_values(features):
    singular = torch.linalg.svdvals(features.double())
    parts = singular / singular.sum() + 1e-7
    return math.exp(-(parts * parts.log()).sum().item())


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(200, 48, 48), (48, 200, 48), (64, 64, 64), (300, 40, 3), (40, 300, 7), (100, 100, 1)]
)
def test_effective_rank_is_that_of_the_singular_values(rows, columns, rank):
    generator = torch.Generator().manual_seed(rows + columns + rank)
    if rank == min(rows, columns):
        features = torch.randn(rows, columns, generator=generator)
    else:
        left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
        features = left @ right
    # The Gram matrix halves the digits of what is nearly zero: the parts of 1e-7 that the definition adds are as small.
    assert effective_rank(features) == pytest.approx(rank_by_singular_values(features), rel=1e-3)
    assert effective_rank(features) <= 1.01 * rank
    skewed = features * torch.logspace(0, -4, columns)
    assert effective_rank(skewed) == pytest.approx(rank_by_singular_values(skewed), rel=1e-3)


@pytest.mark.parametrize(
    "positions",
    [
        PositionsConfig(sigma=0.25),
        PositionsConfig(sigma=0.25, convention="release"),
        PositionsConfig(sigma=0.5, covariance="identity"),
        PositionsConfig(sigma=0.5, covariance="diagonal"),
        PositionsConfig(sigma=0.5, covariance="low_rank(3)"),
        PositionsConfig(sigma=0.5, apply_to="both"),
    ],
    ids=lambda positions: f"{positions.covariance}-{positions.convention}-{positions.apply_to}",
)
def test_noise_to_signal_is_that_of_samples(images, positions):
    objective = tiny_objective(positions=positions)
    torch.nn.init.normal_(objective.predictor.projection.weight, std=0.3)
    layer = objective.predictor.positions
    indices = torch.arange(16).repeat(4000, 1)
    noise = layer.sample(indices, generator=torch.Generator().manual_seed(0)) - layer.mean(indices)
    empirical = noise.square().sum(-1).mean().sqrt() / layer.table().square().sum(-1).mean().sqrt()
    assert measure_health(objective, images).noise_to_signal == pytest.approx(empirical.item(), rel=0.02)


@pytest.mark.parametrize(
    "positions", [PositionsConfig(kind="sincos"), PositionsConfig(kind="learned"), PositionsConfig(apply_to="none")]
)
def test_there_is_no_noise_without_stochastic_positions(images, positions):
    assert measure_health(tiny_objective(positions=positions), images).noise_to_signal == 0


def test_noise_follows_sigma(images):
    objective = tiny_objective(positions=PositionsConfig(sigma=0.25))
    before = measure_health(objective, images).noise_to_signal
    objective.predictor.positions.set_sigma(1.0)
    assert measure_health(objective, images).noise_to_signal == pytest.approx(2 * before)


def test_norms_are_those_of_the_weights(images):
    objective = tiny_objective()
    objective.predictor.projection.weight.data.fill_(0.5)
    objective.predictor.mask_token.data.fill_(0.25)
    signs = measure_health(objective, images)
    assert signs.A_norm == pytest.approx(0.5 * math.sqrt(24 * 16))
    assert signs.mask_token_norm == pytest.approx(0.25 * 4)
    # Sine and cosine of 16 features: eight pairs, each of norm 1.
    assert signs.position_norm == pytest.approx(math.sqrt(8), rel=1e-5)


def test_features_are_the_layer_normed_ones_of_the_target(images):
    objective = tiny_objective()
    torch.nn.init.zeros_(objective.encoder.vit.norm.weight)
    signs = measure_health(objective, images)
    with torch.no_grad():
        features = F.layer_norm(objective.target(images), (24,)).flatten(0, 1)
    assert signs.feature_std == pytest.approx(features.std(0).mean().item(), rel=1e-5)
    assert signs.rankme == pytest.approx(effective_rank(features), rel=1e-5)
    assert signs.rank_limit == 24


def test_equal_features_are_collapsed(images):
    objective = tiny_objective()
    torch.nn.init.zeros_(objective.target.vit.norm.weight)
    torch.nn.init.normal_(objective.target.vit.norm.bias)
    signs = measure_health(objective, images)
    assert signs.feature_std == pytest.approx(0, abs=1e-4)
    assert signs.rankme == pytest.approx(1, abs=0.01)


def test_the_distance_of_the_target_is_relative(images):
    objective = tiny_objective()
    assert ema_distance(objective) == 0
    with torch.no_grad():
        for ours, theirs in zip(objective.encoder.parameters(), objective.target.parameters(), strict=True):
            if ours.requires_grad:
                theirs.copy_(ours * 0.75)
    assert ema_distance(objective) == pytest.approx(0.25, rel=1e-5)
    assert measure_health(objective, images).ema_distance == pytest.approx(0.25, rel=1e-5)


def test_measuring_changes_nothing(images):
    objective = tiny_objective()
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    measure_health(objective, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert objective.training
    assert not objective.target.training
    assert all(torch.equal(before[name], tensor) for name, tensor in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


@pytest.mark.parametrize("kind", OTHERS)
def test_other_objectives_have_the_same_signs(images, kind):
    objective = tiny_objective(positions=PositionsConfig(sigma=0.25), **OTHERS[kind])
    masked = objective.masked_tokens
    masked.mask_token.data.fill_(0.25)
    signs = measure_health(objective, images)
    A = objective.encoder.vit.patch_embed.proj.weight if kind == "data2vec" else objective.decoder.projection.weight
    assert signs.A_norm == pytest.approx(A.norm().item())
    assert signs.mask_token_norm == pytest.approx(0.25 * math.sqrt(masked.mask_token.numel()))
    indices = torch.arange(16).repeat(4000, 1)
    noise = masked.positions.sample(indices, generator=torch.Generator().manual_seed(0)) - masked.positions.mean(
        indices
    )
    empirical = noise.square().sum(-1).mean().sqrt() / masked.positions.table().square().sum(-1).mean().sqrt()
    assert signs.noise_to_signal == pytest.approx(empirical.item(), rel=0.02)
    with torch.no_grad():
        features = F.layer_norm(objective.frozen.eval()(images), (24,)).flatten(0, 1)
    assert signs.rankme == pytest.approx(effective_rank(features), rel=1e-5)
    assert signs.ema_distance == 0


def test_the_distance_of_a_teacher_is_measured_and_mae_has_none():
    for kind, expected in (("data2vec", 1.0), ("mae", 0.0)):
        objective = tiny_objective(**OTHERS[kind])
        for parameter in objective.encoder.parameters():
            parameter.data.mul_(2.0)
        assert ema_distance(objective) == pytest.approx(expected / 2)


@pytest.mark.parametrize("kind", OTHERS)
def test_measuring_other_objectives_changes_nothing(images, kind):
    objective = tiny_objective(**OTHERS[kind])
    modes = [module.training for module in objective.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    # The encoder has drop path, which would draw random numbers, and measure something else, in training mode.
    assert measure_health(objective, images) == measure_health(objective, images)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in objective.modules()] == modes
    assert objective.encoder.training


def test_a_healthy_run_is_silent(images):
    monitor = HealthMonitor()
    assert monitor.warnings(measure_health(tiny_objective(), images)) == []
    assert monitor.warnings(HEALTHY) == []


FAILURES = [
    ({"A_norm": 0.19}, {"A_norm": 0.21}, "A is vanishing"),
    ({"mask_token_norm": 7.6}, {"mask_token_norm": 7.4}, "mask token is exploding"),
    ({"noise_to_signal": 3.1}, {"noise_to_signal": 2.9}, "masked tokens no longer know where they are"),
    ({"feature_std": 0.04}, {"feature_std": 0.06}, "Features are collapsing"),
    ({"rankme": 0.9}, {"rankme": 1.0}, "Features are collapsing"),
]


@pytest.mark.parametrize(("failing", "just_well", "text"), FAILURES)
def test_a_failure_is_told_once_until_it_has_gone(failing, just_well, text):
    monitor = HealthMonitor()
    assert monitor.warnings(HEALTHY) == []
    told = monitor.warnings(replace(HEALTHY, **failing))
    assert len(told) == 1
    assert text in told[0]
    assert "Lower " in told[0]
    assert monitor.warnings(replace(HEALTHY, **failing)) == []
    assert monitor.warnings(replace(HEALTHY, **just_well)) == []
    assert monitor.warnings(replace(HEALTHY, **failing)) == told


def test_a_second_failure_is_told_while_the_first_goes_on():
    monitor = HealthMonitor()
    monitor.warnings(HEALTHY)
    first = replace(HEALTHY, noise_to_signal=4.0)
    assert len(monitor.warnings(first)) == 1
    (told,) = monitor.warnings(replace(first, feature_std=0.0))
    assert "collapsing" in told


def test_A_is_judged_by_where_it_began_also_after_a_resume():
    began = replace(HEALTHY, A_norm=100.0)
    resumed = HealthMonitor(first=HealthSigns(**asdict(began)))
    (told,) = resumed.warnings(HEALTHY)
    assert "A is vanishing: its norm is 2, it began at 100" in told


def test_features_that_are_not_finite_have_no_rank():
    """Their loss is not finite either, and that is what must end the run, not the look at it."""
    features = torch.randn(20, 6)
    features[3, 2] = float("inf")
    assert math.isnan(effective_rank(features))
