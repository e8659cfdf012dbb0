"""Stochastic positions: mean, covariance, gradient and silence."""

import copy

import pytest
import torch
from torch import nn

from stop_mim.errors import InputError
from stop_mim.positions import SinCosPositions, StochasticPositions

GRID, DIM = (3, 5), 8


def make(projection, **options):
    return StochasticPositions(SinCosPositions(GRID, DIM), projection, **options)


@pytest.mark.parametrize("covariance", ["tied", "identity", "diagonal", "untied", "low_rank(3)"])
@pytest.mark.parametrize("convention", ["paper", "release"])
def test_samples_have_the_mean_and_the_covariance_of_the_formula(projection, noisy, covariance, convention):
    positions = make(projection, sigma=0.25, covariance=covariance, convention=convention)
    variance = 0.25 if convention == "paper" else 0.0625
    A = positions.covariance.factor().detach()
    expected = variance * A @ A.T
    samples = noisy(positions, torch.full((1, 200_000), 7))[0].detach()
    bias = projection.bias.detach() if convention == "release" else 0
    scale = expected.diagonal().max()
    torch.testing.assert_close(samples.mean(0), positions.table()[7] + bias, atol=0.01 * scale.sqrt().item(), rtol=0)
    torch.testing.assert_close(torch.cov(samples.T), expected, atol=0.02 * scale.item(), rtol=0)
    torch.testing.assert_close(positions.covariance_matrix().detach(), expected)
    assert positions.noise_power().item() == pytest.approx(expected.trace().item())
    assert torch.linalg.matrix_rank(expected) == (3 if covariance == "low_rank(3)" else DIM)


def test_tied_covariance_is_the_projection_itself_and_identity_learns_nothing(projection):
    assert make(projection).covariance.factor() is projection.weight
    assert not list(make(projection).parameters())
    assert not list(make(projection, covariance="identity").parameters())


def test_learned_covariances_start_with_the_variance_of_a_fresh_projection():
    torch.manual_seed(0)
    projection = nn.Linear(192, 96)
    nn.init.trunc_normal_(projection.weight, std=0.02)
    base = SinCosPositions(GRID, 96)
    tied = StochasticPositions(base, projection).covariance_matrix().trace()
    for covariance in ("diagonal", "untied", "low_rank(8)"):
        trace = StochasticPositions(base, projection, covariance=covariance).covariance_matrix().trace()
        assert trace.item() == pytest.approx(tied.item(), rel=0.1)


@pytest.mark.parametrize("covariance", ["tied", "diagonal", "untied", "low_rank(2)"])
def test_gradient_reaches_the_factor_through_the_noise(projection, indices, covariance):
    positions = make(projection, covariance=covariance)
    positions(indices).square().sum().backward()
    learned = projection.weight if covariance == "tied" else next(positions.covariance.parameters())
    assert learned.grad.abs().sum() > 0


def test_noise_differs_by_token_and_is_that_of_the_generator(projection, indices, noisy):
    positions = make(projection)
    samples = positions(torch.full((2, 3), 7))
    assert torch.unique(samples.flatten(0, 1), dim=0).shape[0] == 6
    assert torch.equal(noisy(positions, indices, seed=3), noisy(positions, indices, seed=3))
    assert not torch.equal(noisy(positions, indices, seed=3), noisy(positions, indices, seed=4))
    noise = positions.draw_noise(indices, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        noisy(positions, indices, seed=3), positions.mean(indices) + 0.5 * noise @ projection.weight.T
    )


@pytest.mark.parametrize("silence", ["eval", "sigma"])
def test_silent_positions_are_bit_equal_to_the_base(projection, indices, silence):
    positions = make(projection, sigma=0.0 if silence == "sigma" else 0.25).train(silence == "sigma")
    assert torch.equal(positions(indices), positions.base(indices))
    assert torch.equal(positions.sample(indices), positions(indices)) == (silence == "sigma")


@pytest.mark.parametrize(
    ("apply_to", "expected"),
    [("masked", {"masked"}), ("context", {"context"}), ("both", {"masked", "context"}), ("none", set())],
)
def test_apply_to_chooses_the_tokens(projection, indices, apply_to, expected):
    positions, base = make(projection, apply_to=apply_to), SinCosPositions(GRID, DIM)(indices)
    kinds = ("masked", "context")
    assert {tokens for tokens in kinds if not torch.equal(positions(indices, tokens=tokens), base)} == expected
    assert {tokens for tokens in kinds if positions.draw_noise(indices, tokens=tokens) is not None} == expected


def test_release_convention_adds_the_bias_to_masked_tokens_only(projection, indices):
    positions = make(projection, convention="release").eval()
    base = positions.base(indices)
    torch.testing.assert_close(positions(indices), base + projection.bias)
    assert torch.equal(positions(indices, tokens="context"), base)
    assert not positions.adds_mask_token
    # The release's deterministic baseline is ψ alone.
    assert torch.equal(make(projection, apply_to="none", convention="release")(indices), base)


def test_deepcopy_of_a_model_keeps_the_tie(projection):
    model = nn.ModuleDict({"projection": projection, "positions": make(projection)})
    twin = copy.deepcopy(model)
    assert twin["positions"].covariance.factor() is twin["projection"].weight
    assert twin["projection"].weight is not projection.weight
    assert set(model.state_dict()) == {"projection.weight", "projection.bias"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sigma": -0.1}, r"sigma is -0\.1"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"apply_to": "all"}, "apply_to is 'all'"),
        ({"covariance": "tide"}, "'tide': did you mean 'tied'"),
        ({"covariance": "low_rank(9)"}, r"low_rank\(9\).* 1 to 8"),
        ({"covariance": f"low_rank({'9' * 5000})"}, "low_rank"),
        ({"covariance": "low_rank"}, r"'low_rank': write low_rank\(r\)"),
        ({"covariance": "tied(3)"}, r"'tied\(3\)': write tied\."),
        ({"convention": "code"}, "convention is 'code'"),
        ({"projection": nn.Linear(4, 6)}, "6 output features and the positions 8"),
        ({"projection": None}, "projection is None"),
    ],
)
def test_bad_arguments_are_named(projection, change, words):
    with pytest.raises(InputError, match=words):
        StochasticPositions(**{"base": SinCosPositions(GRID, DIM), "projection": projection} | change)
