"""The spectrum of the noise, the similarity of noisy positions to fixed ones, and decoding, against known values."""

import math

import pytest
import torch
from torch import nn

from stop_mim.analysis.noise import (
    effective_rank,
    identified,
    noise_spectrum,
    noisy_positions,
    sampled_places,
    similarity_maps,
)
from stop_mim.errors import InputError
from stop_mim.positions import LearnedPositions, Positions, SinCosPositions, StochasticPositions

DIM, GRID, PATCH = 16, (4, 6), 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def with_factor(factor, sigma=0.25, base=None, **options):
    """Stochastic positions with this A, and a bias that must not show up anywhere."""
    projection = nn.Linear(factor.shape[1], factor.shape[0])
    projection.weight.data.copy_(factor)
    nn.init.constant_(projection.bias, 7.0)
    return StochasticPositions(base or SinCosPositions(GRID, factor.shape[0]), projection, sigma, **options)


def stochastic(scale=0.3, sigma=0.25, dim=32, **options):
    return with_factor(scale * torch.randn(dim, dim, generator=seeded(1)) / math.sqrt(dim), sigma, **options)


def test_identity_noise_has_full_rank_and_rank_one_noise_one():
    # Entropy of (3/4, 1/4).
    assert effective_rank(torch.tensor([3.0, 1.0, -1e-12])) == pytest.approx((4 / 3) ** 0.75 * 4**0.25)
    assert effective_rank(torch.zeros(5)) == 0
    identity = noise_spectrum(with_factor(torch.randn(DIM, 24), sigma=0.3, covariance="identity"))
    assert identity.effective_rank == pytest.approx(DIM)
    assert torch.allclose(identity.eigenvalues, torch.full((DIM,), 0.3, dtype=torch.float64), rtol=1e-5)
    direction = torch.randn(DIM, generator=seeded())
    single = noise_spectrum(with_factor(direction[:, None] * torch.ones(1, 24), sigma=0.5))
    assert single.effective_rank == pytest.approx(1, abs=1e-4)
    assert single.eigenvalues[0].item() == pytest.approx(0.5 * 24 * direction.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize(("convention", "variance"), [("paper", 0.5), ("release", 0.25)])
def test_the_trace_is_sigma_times_the_squared_norm_of_A(convention, variance):
    factor = torch.randn(DIM, 24, generator=seeded(1))
    spectrum = noise_spectrum(with_factor(factor, sigma=0.5, convention=convention))
    expected = variance * factor.square().sum().item()
    assert spectrum.trace == pytest.approx(expected, rel=1e-5)
    assert spectrum.eigenvalues.sum().item() == pytest.approx(expected, rel=1e-5)
    assert spectrum.eigenvalues.diff().max() <= 0


def test_the_spectrum_is_that_of_samples():
    positions = with_factor(0.3 * torch.randn(DIM, 24, generator=seeded(2)))
    samples = positions.sample(torch.zeros(1, 50_000, dtype=torch.long), generator=seeded(3))[0].detach().double()
    found = torch.linalg.eigvalsh(samples.T.cov()).flip(0)
    assert torch.allclose(found, noise_spectrum(positions).eigenvalues, rtol=0.05)


def test_noise_is_found_at_its_frequency_and_axis():
    # Features are sines and cosines of columns, then of rows; each quarter has the frequencies from the highest on.
    factor = torch.zeros(DIM, 1)
    factor[DIM // 2 + 1] = 2.0
    spectrum = noise_spectrum(with_factor(factor, sigma=1.0))
    expected = torch.zeros(2, DIM // 4, dtype=torch.float64)
    expected[1, 1] = (4.0 + 0.0) / 2
    assert torch.equal(spectrum.by_frequency, expected)
    assert spectrum.frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    # This feature turns with that frequency from row to row.
    table = SinCosPositions(GRID, DIM).table().unflatten(0, GRID)
    assert torch.allclose(table[:, 0, DIM // 2 + 1], torch.sin(0.1 * torch.arange(4)))


def test_learned_positions_have_no_frequencies_and_other_noise_no_covariance():
    learned = noise_spectrum(with_factor(torch.randn(DIM, 24), base=LearnedPositions(GRID, DIM)))
    assert learned.by_frequency is learned.frequencies is None
    without = with_factor(torch.randn(DIM, 24), apply_to="none")
    for positions in (SinCosPositions(4, DIM), without):
        with pytest.raises(InputError, match="stochastic"):
            noise_spectrum(positions)


def test_without_noise_all_maps_are_the_fixed_one_and_with_it_they_are_not():
    for positions in (stochastic(sigma=0.0), SinCosPositions(GRID, DIM)):
        maps = similarity_maps(positions, PATCH, seeded(), draws=4)
        assert maps.fixed.shape == GRID
        assert maps.fixed.argmax() == PATCH
        assert maps.fixed.max().item() == pytest.approx(1)
        assert torch.allclose(maps.sample, maps.fixed)
        assert torch.allclose(maps.mean, maps.fixed)
    noisy = [similarity_maps(stochastic(scale), PATCH, seeded(), 256) for scale in (0.0, 0.5, 2.0, 8.0)]
    peaks = [maps.mean.max().item() for maps in noisy]
    assert peaks == sorted(peaks, reverse=True), "the mean falls as noise grows"
    assert not torch.allclose(noisy[-1].sample, noisy[-1].mean, atol=0.02)


def test_samples_are_around_the_position_without_the_releases_bias():
    for convention in ("paper", "release"):
        positions = stochastic(convention=convention)
        samples = noisy_positions(positions, PATCH, 20_000, seeded())
        assert torch.allclose(samples.mean(0), positions.table()[PATCH], atol=0.02)


class TwoPlaces(Positions):
    """Two positions, two apart."""

    grid, dim = (1, 2), 4

    def table(self):
        return torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])


def test_two_positions_are_decoded_as_often_as_theory_says():
    # The best decoder errs where the noise along the difference is beyond half of it.
    positions = StochasticPositions(TwoPlaces(), None, sigma=0.64, covariance="identity")
    expected = 0.5 * (1 + math.erf(1 / 0.8 / math.sqrt(2)))
    assert identified(positions, seeded(), draws=20_000) == pytest.approx(expected, abs=0.01)


def test_places_are_read_as_theory_says():
    # Columns 0 and 1 are at ±0.5 of their middle, positions at ±1: the best reading multiplies by 0.5 / (1 + σ).
    positions = StochasticPositions(TwoPlaces(), None, sigma=0.64, covariance="identity")
    places = sampled_places(positions, [0, 1], seeded(), draws=20_000)
    assert places.mean(1).flatten().tolist() == pytest.approx([0.5 - 0.5 / 1.64, 0, 0.5 + 0.5 / 1.64, 0], abs=0.01)
    assert places[:, :, 0].std(1).tolist() == pytest.approx([0.8 * 0.5 / 1.64] * 2, abs=0.01)


def test_a_decoder_that_knows_the_covariance_ignores_noise_in_other_directions():
    factor = torch.zeros(4, 4)
    factor[1, 1] = 100.0
    assert identified(with_factor(factor, sigma=1.0, base=TwoPlaces()), seeded(), 64) == 1.0
    factor[0, 0] = 100.0
    assert identified(with_factor(factor, sigma=1.0, base=TwoPlaces()), seeded(), 2000) < 0.6
