import math

import pytest
import torch
from analysed_runs import pretend
from torch import nn

from stop_mim.analysis.covariance import (
    effective_rank,
    noise_history,
    noise_spectrum,
    noise_to_signal,
    spectra_over_training,
    variance_by_frequency,
)
from stop_mim.analysis.runs import open_run, read_records
from stop_mim.errors import InputError
from stop_mim.positions import JitteredPositions, LearnedPositions, SinCosPositions, StochasticPositions
from stop_mim.training.config import PositionsConfig

DIM = 16


def stochastic(factor, sigma=0.25, base=None, **options):
    projection = nn.Linear(factor.shape[1], factor.shape[0])
    projection.weight.data.copy_(factor)
    return StochasticPositions(base or SinCosPositions((4, 6), DIM), projection, sigma, **options)


def test_effective_rank_of_known_spectra():
    assert effective_rank(torch.ones(12)) == pytest.approx(12)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(5)) == 0
    # Entropy of (3/4, 1/4).
    expected = (4 / 3) ** 0.75 * 4**0.25
    assert effective_rank(torch.tensor([3.0, 1.0, -1e-12])) == pytest.approx(expected)


def test_identity_noise_has_full_rank_and_rank_one_noise_one():
    identity = noise_spectrum(stochastic(torch.randn(DIM, 24), sigma=0.3, covariance="identity"))
    assert identity.effective_rank == pytest.approx(DIM)
    assert torch.allclose(identity.eigenvalues, torch.full((DIM,), 0.3, dtype=torch.float64), rtol=1e-5)
    direction = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    single = noise_spectrum(stochastic(direction[:, None] * torch.ones(1, 24), sigma=0.5))
    assert single.effective_rank == pytest.approx(1, abs=1e-4)
    assert single.eigenvalues[0].item() == pytest.approx(0.5 * 24 * direction.square().sum().item(), rel=1e-5)
    assert single.eigenvalues[1:].max() < 1e-5


@pytest.mark.parametrize(("convention", "variance"), [("paper", 0.5), ("release", 0.25)])
def test_the_trace_is_sigma_times_the_squared_norm_of_A(convention, variance):
    factor = torch.randn(DIM, 24, generator=torch.Generator().manual_seed(1))
    spectrum = noise_spectrum(stochastic(factor, sigma=0.5, convention=convention))
    expected = variance * factor.square().sum().item()
    assert spectrum.trace == pytest.approx(expected, rel=1e-5)
    assert spectrum.eigenvalues.sum().item() == pytest.approx(expected, rel=1e-5)
    assert spectrum.eigenvalues.diff().max() <= 0
    assert torch.allclose(spectrum.variances, variance * factor.double().square().sum(1), rtol=1e-5)


def test_the_spectrum_is_that_of_samples():
    positions = stochastic(0.3 * torch.randn(DIM, 24, generator=torch.Generator().manual_seed(2)))
    patch = torch.zeros(1, 50_000, dtype=torch.long)
    samples = positions.sample(patch, generator=torch.Generator().manual_seed(3))[0].detach().double()
    found = torch.linalg.eigvalsh(samples.T.cov()).flip(0)
    assert torch.allclose(found, noise_spectrum(positions).eigenvalues, rtol=0.05)


def test_noise_is_found_at_the_frequency_and_axis_that_it_was_put_to():
    # Features are sines and cosines of columns, then of rows; each quarter has the frequencies from the highest on.
    factor = torch.zeros(DIM, 1)
    factor[DIM // 2 + 1] = 2.0
    spectrum = noise_spectrum(stochastic(factor, sigma=1.0))
    expected = torch.zeros(2, DIM // 4, dtype=torch.float64)
    expected[1, 1] = (4.0 + 0.0) / 2
    assert torch.equal(spectrum.by_frequency, expected)
    assert spectrum.frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    # It is the feature that turns by this frequency from row to row, and not from column to column.
    table = SinCosPositions((4, 6), DIM).table().unflatten(0, (4, 6))
    assert torch.allclose(table[:, 0, DIM // 2 + 1], torch.sin(0.1 * torch.arange(4)))
    assert variance_by_frequency(torch.arange(8.0)).tolist() == [[1.0, 2.0], [5.0, 6.0]]


def test_noise_to_signal_of_every_feature():
    table = torch.tensor([[3.0, 1.0, 0.0], [4.0, -1.0, 0.0]])
    covariance = torch.diag(torch.tensor([4.0, 9.0, 1.0]))
    assert noise_to_signal(covariance, table).tolist() == pytest.approx([2 / math.sqrt(12.5), 3.0, math.inf])


def test_learned_positions_have_no_frequencies_and_other_noise_no_covariance():
    learned = noise_spectrum(stochastic(torch.randn(DIM, 24), base=LearnedPositions((4, 6), DIM)))
    assert learned.by_frequency is None
    assert learned.frequencies is None
    for positions in (
        SinCosPositions(4, DIM),
        JitteredPositions(4, DIM),
        stochastic(torch.randn(DIM, 24), apply_to="none"),
    ):
        with pytest.raises(InputError, match="name a run with stochastic positions"):
            noise_spectrum(positions)


def test_history_comes_from_the_looks_at_health(stop_run):
    run = read_records(stop_run)
    history = noise_history(run.metrics)
    assert history.steps == [1, 2, 4, 6, 8]
    assert history.A_norm[-1] == run.newest("health/A_norm")
    assert history.mask_token_norm[0] == run.metrics[0]["health/mask_token_norm"]
    assert noise_history([{"step": 3, "loss": 0.1}]).steps == []


def test_spectra_over_training_come_from_the_milestones(stop_run, tmp_path):
    found = dict(spectra_over_training(read_records(stop_run)))
    assert list(found) == [4, 8]
    last = noise_spectrum(open_run(stop_run).objective.positions)
    assert torch.equal(found[8].eigenvalues, last.eigenvalues)
    assert not torch.equal(found[4].eigenvalues, last.eigenvalues)
    # The norm in the metrics of that step is the same A.
    logged = {line["step"]: line for line in read_records(stop_run).metrics}
    assert found[4].trace == pytest.approx(0.25 * logged[4]["health/A_norm"] ** 2, rel=1e-4)
    fixed = pretend(stop_run, tmp_path / "fixed", positions=PositionsConfig(kind="sincos"))
    with pytest.raises(InputError, match="name a run with stochastic positions"):
        list(spectra_over_training(read_records(fixed)))
