"""Jittered coordinates: the continuous embedding and the distribution of its samples."""

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


def test_shifted_positions_are_those_of_the_shifted_coordinates():
    table = SinCosPositions(GRID, DIM).table()
    shifts = torch.randn(3, 5, 2, generator=seeded())
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
    shifted = shifted_positions(table.unflatten(0, GRID), shifts, FREQUENCIES)
    expected = sincos_positions(rows + shifts[..., 0].double(), columns + shifts[..., 1].double(), DIM)
    torch.testing.assert_close(shifted, expected, atol=1e-6, rtol=0)
    assert torch.equal(shifted_positions(table, torch.zeros(15, 2), FREQUENCIES), table)


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_samples_have_the_mean_and_the_power_of_the_formula(noisy, scale):
    positions = JitteredPositions(GRID, DIM, scale=scale)
    samples, psi = noisy(positions, torch.full((1, 200_000), 7))[0], positions.table()[7]
    # A normal shift damps every wave: E sin(ω (x + δ)) = exp(-ω² scale² / 2) sin(ω x).
    damping = torch.exp(-FREQUENCIES.square() * scale**2 / 2).repeat(4)
    torch.testing.assert_close(samples.mean(0), psi * damping, atol=0.01 * scale, rtol=0)
    power = (samples - psi).square().sum(-1).mean()
    assert positions.noise_power().item() == pytest.approx(power.item(), rel=0.02)
    # Unlike noise that is added, jitter never leaves the curve of positions.
    torch.testing.assert_close(samples.square().sum(-1), psi.square().sum().expand(len(samples)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("silence", ["eval", "nowhere", "scale"])
def test_silent_positions_are_bit_equal_to_sine_and_cosine(indices, silence):
    scale, apply_to = 0.0 if silence == "scale" else 0.5, "none" if silence == "nowhere" else "masked"
    positions = JitteredPositions(GRID, DIM, scale, apply_to).train(silence != "eval")
    assert torch.equal(positions(indices), SinCosPositions(GRID, DIM)(indices))
    assert (positions.noise_power() > 0) == (silence == "eval")
    assert torch.equal(positions.sample(indices), positions(indices)) == (silence == "scale")


def test_the_options_build_it_and_mistakes_are_named():
    jittered = PositionsConfig(kind="jittered", jitter_scale=0.75, apply_to="both")
    positions = build_positions(jittered, GRID, nn.Linear(12, DIM))
    assert repr(positions).startswith("JitteredPositions(\n  grid=3x5, dim=8, scale=0.75, apply_to=both")
    assert not positions.state_dict()
    with pytest.raises(InputError, match=r"positions.convention is release"):
        build_positions(PositionsConfig(kind="jittered", convention="release"), GRID, nn.Linear(12, DIM))
    with pytest.raises(InputError, match=r"scale is -0\.1"):
        JitteredPositions(GRID, DIM, scale=-0.1)
