import math

import pytest
import torch
from torch import nn

from stop_mim.analysis.similarity import cosines, identified, most_similar, noisy_positions, similarity_maps
from stop_mim.errors import InputError
from stop_mim.positions import JitteredPositions, Positions, SinCosPositions, StochasticPositions

DIM, GRID, PATCH = 32, (4, 6), 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def stochastic(scale=0.3, sigma=0.25, base=None, **options):
    base = base or SinCosPositions(GRID, DIM)
    projection = nn.Linear(base.dim, base.dim)
    projection.weight.data.copy_(scale * torch.randn(base.dim, base.dim, generator=seeded(1)) / math.sqrt(base.dim))
    nn.init.constant_(projection.bias, 7.0)
    return StochasticPositions(base, projection, sigma, **options)


def test_a_position_is_like_itself_and_most_like_itself():
    table = SinCosPositions(GRID, DIM).table()
    similar = cosines(table, table)
    assert torch.allclose(similar.diagonal(), torch.ones(24, dtype=torch.float64))
    assert torch.equal(similar.argmax(1), torch.arange(24))
    assert cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])).tolist() == [
        pytest.approx([0.6, 0.0, -1.0])
    ]


def test_maps_have_the_grids_shape_and_the_fixed_one_its_peak_at_the_patch():
    maps = similarity_maps(stochastic(), PATCH, seeded())
    for part in (maps.fixed, maps.sample, maps.mean):
        assert part.shape == GRID
    assert maps.fixed[divmod(PATCH, GRID[1])].item() == pytest.approx(1)
    assert maps.fixed.argmax() == PATCH


def test_without_noise_all_maps_are_the_fixed_one_and_with_it_they_are_not():
    for positions in (stochastic(sigma=0.0), SinCosPositions(GRID, DIM), JitteredPositions(GRID, DIM, scale=0.0)):
        maps = similarity_maps(positions, PATCH, seeded(), draws=4)
        assert torch.allclose(maps.sample, maps.fixed)
        assert torch.allclose(maps.mean, maps.fixed)
    noisy = similarity_maps(stochastic(scale=3.0), PATCH, seeded())
    assert noisy.mean.max() < 0.9
    assert not torch.allclose(noisy.sample, noisy.mean, atol=0.02)


def test_the_mean_is_over_samples_and_falls_as_noise_grows():
    positions = stochastic(scale=2.0)
    samples = noisy_positions(positions, PATCH, 64, seeded())
    expected = cosines(samples, positions.table()).mean(0).unflatten(0, GRID)
    assert torch.allclose(similarity_maps(positions, PATCH, seeded(), draws=64).mean, expected)
    peaks = [similarity_maps(stochastic(scale), PATCH, seeded()).mean.max().item() for scale in (0.0, 0.5, 2.0, 8.0)]
    assert peaks == sorted(peaks, reverse=True)


def test_samples_are_around_the_position_without_the_releases_bias():
    for convention in ("paper", "release"):
        positions = stochastic(convention=convention)
        samples = noisy_positions(positions, PATCH, 20_000, seeded())
        assert torch.allclose(samples.mean(0), positions.table()[PATCH], atol=0.02)


def test_the_same_seed_gives_the_same_maps_in_training_mode_too():
    positions = stochastic()
    first = similarity_maps(positions.eval(), PATCH, seeded(5))
    again = similarity_maps(positions.train(), PATCH, seeded(5))
    assert torch.equal(first.sample, again.sample)


def test_small_noise_leaves_a_sample_most_like_its_own_position():
    assert (most_similar(stochastic(scale=0.05), PATCH, seeded()) == PATCH).all()
    confused = most_similar(stochastic(scale=20.0), PATCH, seeded(), draws=2000)
    assert (confused == PATCH).double().mean() < 0.5


class TwoPlaces(Positions):
    """Two positions, two apart."""

    grid, dim = (1, 2), 4

    def table(self):
        return torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])


def test_two_positions_are_told_apart_as_often_as_theory_says():
    # The best decoder errs where the noise along the difference goes beyond half of it.
    positions = StochasticPositions(TwoPlaces(), None, sigma=0.64, covariance="identity")
    expected = 0.5 * (1 + math.erf(1 / 0.8 / math.sqrt(2)))
    assert identified(positions, seeded(), draws=20_000) == pytest.approx(expected, abs=0.01)


def test_a_decoder_that_knows_the_covariance_sees_past_noise_in_other_directions():
    factor = torch.zeros(4, 4)
    factor[1, 1] = 100.0
    projection = nn.Linear(4, 4)
    projection.weight.data.copy_(factor)
    assert identified(StochasticPositions(TwoPlaces(), projection, sigma=1.0), seeded()) == 1.0
    projection.weight.data.copy_(factor.T.flip(0, 1) + torch.diag(torch.tensor([100.0, 0, 0, 0])))
    assert identified(StochasticPositions(TwoPlaces(), projection, sigma=1.0), seeded(), 2000) < 0.6


def test_a_patch_outside_the_grid_is_told_in_one_sentence():
    with pytest.raises(InputError, match=r"The patch is 24: give one of 0 to 23, of 4x6 patches\."):
        similarity_maps(stochastic(), 24, seeded())
