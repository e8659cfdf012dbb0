"""The paper's propositions: what the simulation shows, also where it is not what the paper's words say."""

import math
from dataclasses import replace

import pytest
import torch

from stop_mim.analysis.theory import (
    ToyBatch,
    ToyTask,
    convolution,
    gradients_at_zero,
    normal_prior,
    optimal_predictor,
    square_wave,
    train_predictor,
    train_toy,
    uniform_prior,
)

# Largest error of a network that was trained for seconds, where there are examples; the wave is from -1 to 1.
TOLERANCE = 0.08


def places(reach):
    return torch.linspace(-reach, reach, 121, dtype=torch.float64)


def test_a_convolution_with_a_gaussian_damps_a_wave_by_its_frequency():
    r = places(5)
    for omega in (0.5, 1.0, 1.5):
        smooth = convolution(lambda x, omega=omega: torch.sin(omega * x), r)
        assert torch.allclose(smooth, math.exp(-(omega**2) / 2) * torch.sin(omega * r), atol=1e-6)


def test_with_a_flat_prior_the_optimum_is_the_convolution():
    """Proposition 1, where it holds: every position is as likely as any other, as far as the noise reaches."""
    r = places(6)
    optimum = optimal_predictor(square_wave, uniform_prior(20.0, 4001), r)
    assert torch.allclose(optimum, convolution(square_wave, r), atol=1e-6)


def test_at_the_borders_of_the_prior_it_is_not():
    """Where the image ends there is nothing to smooth with: the optimum stays at the border's value."""
    prior, r = uniform_prior(6.0), places(6)
    apart = (optimal_predictor(square_wave, prior, r) - convolution(square_wave, r)).abs()
    assert apart[r.abs() < 2].max() < 0.01
    assert apart[r.abs() > 5].max() > 0.3


def test_with_another_prior_it_is_not_either():
    """Proposition 1 as written lacks the prior: for X ~ N(0, 1) and Y = X it says r, and the optimum is r / 2."""
    r = places(3)
    straight = optimal_predictor(lambda x: x, normal_prior(1.0), r)
    assert torch.allclose(straight, r / 2, atol=1e-6)
    assert torch.allclose(convolution(lambda x: x, r), r, atol=1e-6)
    wider = optimal_predictor(lambda x: x, normal_prior(10.0, 4001), r)
    assert torch.allclose(wider, r * 100 / 101, atol=1e-5)


@pytest.mark.parametrize(("prior", "reach"), [(uniform_prior(6.0), 6.0), (normal_prior(1.0), 2.5)])
def test_a_trained_predictor_agrees_with_the_closed_form(prior, reach):
    """The network, which knows nothing of priors, agrees with the optimum and not with the convolution."""
    network, r = train_predictor(square_wave, prior, steps=600), places(reach)
    learned = network(r)
    assert (learned - optimal_predictor(square_wave, prior, r)).abs().max() < TOLERANCE
    assert (learned - convolution(square_wave, r)).abs().max() > 3 * TOLERANCE


class AntitheticTask(ToyTask):
    """Every example twice, with n and -n: at A = 0 the gradient is linear in n, so its mean over the noise is exact."""

    def sample(self, count, generator):
        one = super().sample(count, generator)
        other = replace(one, noise=-one.noise)
        return ToyBatch(*(torch.cat(pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True)))


@pytest.mark.parametrize("informative", [True, False])
def test_tied_the_gradient_at_zero_is_that_of_the_model_without_noise(informative):
    """Not only is one zero where the other is: with the noise averaged exactly they are equal."""
    found = gradients_at_zero(AntitheticTask(informative=informative, sigma=4.0), 500)
    assert torch.allclose(found["tied"], found["deterministic"], atol=1e-14)


def test_where_the_context_matters_zero_is_not_stationary_if_tied_and_is_if_untied():
    found = gradients_at_zero(AntitheticTask(informative=True), 4000)
    assert found["tied"].norm() > 0.1
    assert found["untied"].norm() < 1e-14


def test_where_the_context_does_not_matter_zero_is_stationary_however_tied():
    """Both gradients are only as large as an estimate from so many samples is wrong."""
    few, many = (gradients_at_zero(ToyTask(informative=False), count) for count in (400, 40_000))
    for name in ("tied", "untied", "deterministic"):
        sizes = [found[name].norm().item() for found in (few, many)]
        # A hundred times as many samples, a tenth of the error.
        assert 1 / 20 < sizes[1] / sizes[0] < 1 / 4, name
    informative = gradients_at_zero(ToyTask(informative=True), 40_000)
    assert informative["tied"].norm() > 20 * many["tied"].norm()


def test_a_tied_A_stays_and_an_untied_one_is_silenced():
    tied, untied = (list(train_toy(ToyTask(), tying, steps=120).values()) for tying in ("tied", "untied"))
    assert tied[-1] > 2
    assert untied[-1] < 0.5 * untied[0]


def test_simulations_can_be_repeated_and_leave_the_global_stream_alone():
    before = torch.random.get_rng_state()
    first, again = (train_toy(ToyTask(), "tied", steps=5) for _ in range(2))
    assert first == again
    assert train_toy(ToyTask(), "tied", steps=5, seed=1) != first
    assert torch.equal(before, torch.random.get_rng_state())
