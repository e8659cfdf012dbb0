"""Jittered coordinates: the continuous embedding, the distribution of its samples, and a scale that learns."""

import math

import pytest
import torch
from torch import nn

from stop_mim.errors import InputError
from stop_mim.models.build import build_positions
from stop_mim.positions import (
    JitteredPositions,
    SinCosPositions,
    shifted_positions,
    sincos_frequencies,
    sincos_positions,
)
from stop_mim.training.config import PositionsConfig

GRID, DIM = (3, 5), 8
FREQUENCIES = sincos_frequencies(DIM).float()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(positions, patch=7, draws=200_000, seed=0):
    indices = torch.full((1, draws), patch)
    return positions(indices, noise=positions.draw_noise(indices, generator=seeded(seed)))[0]


def test_shifted_positions_are_those_of_the_shifted_coordinates():
    shifts = torch.randn(3, 5, 2, generator=seeded())
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
    shifted = shifted_positions(SinCosPositions(GRID, DIM).table().unflatten(0, GRID), shifts, FREQUENCIES)
    expected = sincos_positions(rows + shifts[..., 0].double(), columns + shifts[..., 1].double(), DIM)
    torch.testing.assert_close(shifted, expected, atol=1e-6, rtol=0)


def test_a_shift_of_nothing_changes_no_bit_and_one_of_a_patch_is_the_next_patch():
    table = SinCosPositions(GRID, DIM).table()
    assert torch.equal(shifted_positions(table, torch.zeros(15, 2), FREQUENCIES), table)
    down, right = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for shift, neighbour in ((down, 12), (right, 8), (-right, 6)):
        moved = shifted_positions(table[7], shift, FREQUENCIES)
        torch.testing.assert_close(moved, table[neighbour], atol=1e-6, rtol=0)


@pytest.mark.parametrize("draw", [JitteredPositions.forward, JitteredPositions.sample])
def test_whole_coordinates_are_those_of_the_table_bit_for_bit(draw):
    positions, patches = JitteredPositions((7, 11), 64, scale=0.0), torch.arange(77)[None]
    assert torch.equal(draw(positions, patches)[0], SinCosPositions((7, 11), 64).table())


@pytest.mark.parametrize("scale", [0.1, 0.5, 2.0])
def test_samples_have_the_mean_and_the_power_of_the_formula(scale):
    positions = JitteredPositions(GRID, DIM, scale=scale)
    samples, psi = draw(positions).detach(), positions.table()[7]
    # A normal shift damps every wave: E sin(ω (x + δ)) = exp(-ω² scale² / 2) sin(ω x).
    damping = torch.exp(-FREQUENCIES.square() * scale**2 / 2).repeat(4)
    torch.testing.assert_close(samples.mean(0), psi * damping, atol=0.01 * scale, rtol=0)
    power = (samples - psi).square().sum(-1).mean()
    assert positions.noise_power().item() == pytest.approx(power.item(), rel=0.02)
    # Unlike noise that is added, jitter never leaves the curve of positions.
    torch.testing.assert_close(samples.square().sum(-1), psi.square().sum().expand(len(samples)), atol=1e-5, rtol=0)


def test_the_covariance_of_a_small_jitter_is_that_of_the_jacobian():
    positions, scale = JitteredPositions(GRID, DIM, learned=True), torch.tensor([0.01, 0.03])
    positions.log_scale.data.copy_(scale.log())
    where = torch.tensor([1.0, 2.0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: sincos_positions(x[0], x[1], DIM), where).float()
    expected = jacobian @ torch.diag(scale.square()) @ jacobian.T
    measured = torch.cov(draw(positions).detach().T)
    torch.testing.assert_close(measured, expected, atol=0.02 * expected.diagonal().max().item(), rtol=0)
    # Rows and columns are orthogonal, and every patch is as sensitive as any other.
    energy = FREQUENCIES.square().sum()
    torch.testing.assert_close(jacobian.T @ jacobian, energy * torch.eye(2), atol=1e-6, rtol=1e-5)
    assert torch.linalg.matrix_rank(expected, rtol=1e-4) == 2
    assert positions.noise_power().item() == pytest.approx((energy * scale.square().sum()).item(), rel=1e-3)


def test_rows_and_columns_have_scales_of_their_own():
    positions = JitteredPositions(GRID, DIM, learned=True)
    positions.log_scale.data.copy_(torch.tensor([0.7, 1e-20]).log())
    moved = draw(positions, draws=10) - positions.table()[7]
    assert not moved[:, : DIM // 2].any()
    assert moved[:, DIM // 2 :].abs().sum(-1).min() > 0


def test_gradient_reaches_a_learned_scale(indices):
    positions = JitteredPositions(GRID, DIM, scale=0.5, learned=True)
    torch.testing.assert_close(positions.scale().detach(), torch.tensor([0.5, 0.5]))
    positions(indices).square().matmul(torch.arange(8.0)).sum().backward()
    assert (positions.log_scale.grad.abs() > 0).all()
    assert not list(JitteredPositions(GRID, DIM).parameters())
    assert not JitteredPositions(GRID, DIM).state_dict()


def test_the_gradient_is_that_of_the_expected_power():
    positions = JitteredPositions(GRID, DIM, scale=0.5, learned=True)
    power = (draw(positions) - positions.table()[7]).square().sum(-1).mean()
    (sampled,) = torch.autograd.grad(power, positions.log_scale)
    (expected,) = torch.autograd.grad(positions.noise_power(), positions.log_scale)
    torch.testing.assert_close(sampled, expected, rtol=0.02, atol=0)


def test_nothing_ties_a_learned_scale():
    positions = JitteredPositions(GRID, DIM, scale=0.5, learned=True)
    optimiser = torch.optim.Adam(positions.parameters(), 0.1)
    for _ in range(200):
        optimiser.zero_grad()
        (draw(positions, draws=50) - positions.table()[7]).square().sum().backward()
        optimiser.step()
    assert positions.scale().max() < 0.05


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("silence", ["eval", "nowhere"])
def test_silent_positions_are_bit_equal_to_sine_and_cosine(indices, silence, learned):
    positions = JitteredPositions(GRID, DIM, learned=learned, apply_to="none" if silence == "nowhere" else "masked")
    positions.train(silence != "eval")
    assert torch.equal(positions(indices), SinCosPositions(GRID, DIM)(indices))
    assert (positions.noise_power() == 0) == (silence == "nowhere")
    assert all(parameter.requires_grad == (silence == "eval") for parameter in positions.parameters())
    assert not torch.equal(positions.sample(indices), positions(indices))


@pytest.mark.parametrize(
    ("apply_to", "noisy"),
    [("masked", {"masked"}), ("context", {"context"}), ("both", {"masked", "context"}), ("none", set())],
)
def test_apply_to_chooses_the_tokens(indices, apply_to, noisy):
    positions = JitteredPositions(GRID, DIM, apply_to=apply_to)
    base = positions.base(indices)
    assert {name for name in ("masked", "context") if not torch.equal(positions(indices, tokens=name), base)} == noisy


def test_the_generator_decides_the_noise_of_each_token(indices):
    positions = JitteredPositions(GRID, DIM)
    samples = draw(positions, draws=6)
    assert len(samples.unique(dim=0)) == 6
    assert torch.equal(draw(positions, draws=6), samples)
    assert not torch.equal(draw(positions, draws=6, seed=1), samples)
    assert "scale=0.5x0.5, learned=False, apply_to=masked" in repr(positions)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": -0.1}, r"scale is -0\.1"),
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": 0.0, "learned": True}, "scale is 0 and learned"),
        ({"apply_to": "all"}, "apply_to is 'all'"),
    ],
)
def test_bad_arguments_are_named(change, words):
    with pytest.raises(InputError, match=words):
        JitteredPositions(**{"grid": GRID, "dim": DIM} | change)


def test_the_configuration_asks_for_it_by_name():
    jittered = PositionsConfig(kind="jittered", jitter_scale=0.75, jitter_learned=True, apply_to="both")
    positions = build_positions(jittered, GRID, nn.Linear(12, DIM))
    assert isinstance(positions, JitteredPositions)
    assert (positions.learned, positions.apply_to) == (True, "both")
    torch.testing.assert_close(positions.scale().detach(), torch.tensor([0.75, 0.75]))
    with pytest.raises(InputError, match=r"positions\.jitter_scale is 0\.0"):
        PositionsConfig(kind="jittered", jitter_scale=0.0, jitter_learned=True)
    with pytest.raises(InputError, match=r"positions.convention is release"):
        build_positions(PositionsConfig(kind="jittered", convention="release"), GRID, nn.Linear(12, DIM))


@pytest.mark.parametrize("learned", [False, True])
def test_a_model_learns_with_it(train_briefly, learned):
    objective, losses = train_briefly(PositionsConfig(kind="jittered", jitter_learned=learned))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    moved = (objective.predictor.positions.scale() - 0.5).abs()
    assert (moved > 0.01).all() if learned else not moved.any()
