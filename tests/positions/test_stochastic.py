"""A stochastic layer is believed when its mean, covariance, gradient and silence are all measured."""

import copy

import pytest
import torch
from torch import nn

from stop_mim.positions import SinCosPositions, StochasticPositions

GRID, DIM = (3, 5), 8


def sampled_covariance(positions, draws=200_000):
    samples = positions(torch.full((1, draws), 7), generator=torch.Generator().manual_seed(0))[0].detach()
    return samples.mean(0), torch.cov(samples.T)


@pytest.mark.parametrize("covariance", ["tied", "identity", "diagonal", "untied", "low_rank(3)"])
@pytest.mark.parametrize("convention", ["paper", "release"])
def test_samples_have_the_mean_and_the_covariance_of_the_formula(projection, covariance, convention):
    base = SinCosPositions(GRID, DIM)
    positions = StochasticPositions(base, projection, sigma=0.25, covariance=covariance, convention=convention)
    variance = 0.25 if convention == "paper" else 0.0625
    A = positions.covariance.factor().detach()
    expected = variance * A @ A.T
    mean, cov = sampled_covariance(positions)
    bias = projection.bias.detach() if convention == "release" else 0
    scale = expected.diagonal().max()
    torch.testing.assert_close(mean, base.table()[7] + bias, atol=0.01 * scale.sqrt().item(), rtol=0)
    torch.testing.assert_close(cov, expected, atol=0.02 * scale.item(), rtol=0)
    torch.testing.assert_close(positions.covariance_matrix().detach(), expected)
    assert positions.noise_power().item() == pytest.approx(expected.trace().item())
    rank = {"low_rank(3)": 3}.get(covariance, DIM)
    assert torch.linalg.matrix_rank(expected) == rank


def test_tied_covariance_is_the_projection_itself_and_identity_learns_nothing(projection):
    tied = StochasticPositions(SinCosPositions(GRID, DIM), projection)
    assert tied.covariance.factor() is projection.weight
    assert not list(tied.parameters())
    assert not list(StochasticPositions(SinCosPositions(GRID, DIM), projection, covariance="identity").parameters())


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
    positions = StochasticPositions(SinCosPositions(GRID, DIM), projection, covariance=covariance)
    positions(indices).square().sum().backward()
    learned = projection.weight if covariance == "tied" else next(positions.covariance.parameters())
    assert learned.grad.abs().sum() > 0


def test_noise_is_drawn_for_every_token_anew(projection):
    noisy = StochasticPositions(SinCosPositions(GRID, DIM), projection)(torch.full((2, 3), 7))
    assert torch.unique(noisy.flatten(0, 1), dim=0).shape[0] == 6


@pytest.mark.parametrize("silence", ["eval", "sigma"])
def test_silent_positions_are_bit_equal_to_the_base(projection, indices, silence):
    base = SinCosPositions(GRID, DIM)
    positions = StochasticPositions(base, projection, sigma=0.0 if silence == "sigma" else 0.25)
    positions.train(silence == "sigma")
    assert torch.equal(positions(indices), base(indices))


def test_sample_draws_in_eval_mode_too(projection, indices):
    positions = StochasticPositions(SinCosPositions(GRID, DIM), projection).eval()
    assert not torch.equal(positions.sample(indices), positions(indices))


@pytest.mark.parametrize(
    ("apply_to", "noisy"),
    [("masked", {"masked"}), ("context", {"context"}), ("both", {"masked", "context"}), ("none", set())],
)
def test_apply_to_chooses_the_tokens(projection, indices, apply_to, noisy):
    base = SinCosPositions(GRID, DIM)
    positions = StochasticPositions(base, projection, apply_to=apply_to)
    seen = {
        tokens for tokens in ("masked", "context") if not torch.equal(positions(indices, tokens=tokens), base(indices))
    }
    assert seen == noisy


def test_release_convention_adds_the_bias_to_masked_tokens_only(projection, indices):
    base = SinCosPositions(GRID, DIM)
    positions = StochasticPositions(base, projection, convention="release").eval()
    torch.testing.assert_close(positions(indices), base(indices) + projection.bias)
    assert torch.equal(positions(indices, tokens="context"), base(indices))
    assert not positions.adds_mask_token
    # The release's deterministic baseline is ψ alone.
    baseline = StochasticPositions(base, projection, apply_to="none", convention="release")
    assert torch.equal(baseline(indices), base(indices))


def test_generator_makes_it_reproducible(projection, indices):
    positions = StochasticPositions(SinCosPositions(GRID, DIM), projection)
    first, second = (positions(indices, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, positions(indices, generator=torch.Generator().manual_seed(4)))


def test_sigma_follows_a_schedule(projection, indices):
    positions = StochasticPositions(SinCosPositions(GRID, DIM), projection, sigma=lambda step: 0.1 * step)
    assert torch.equal(positions(indices), positions.base(indices))
    positions.set_step(4)
    assert positions.sigma == pytest.approx(0.4)
    assert positions.noise_std.item() == pytest.approx(0.4**0.5)
    assert not torch.equal(positions(indices), positions.base(indices))


def test_resized_shares_the_factor(projection):
    positions = StochasticPositions(SinCosPositions(GRID, DIM), projection, sigma=0.5, covariance="low_rank(2)")
    wide = positions.resized((6, 10))
    assert wide.grid == (6, 10)
    assert wide.covariance.factor() is positions.covariance.factor()
    assert torch.equal(wide.covariance_matrix(), positions.covariance_matrix())


def test_deepcopy_of_a_model_keeps_the_tie(projection):
    model = nn.ModuleDict(
        {"projection": projection, "positions": StochasticPositions(SinCosPositions(GRID, DIM), projection)}
    )
    twin = copy.deepcopy(model)
    assert twin["positions"].covariance.factor() is twin["projection"].weight
    assert twin["projection"].weight is not projection.weight
    assert set(model.state_dict()) == {"projection.weight", "projection.bias"}


def test_extra_repr(projection):
    text = repr(StochasticPositions(SinCosPositions(GRID, DIM), projection, sigma=0.25))
    assert "sigma=0.25, apply_to=masked, covariance=tied, convention=paper" in text
    assert "grid=3x5, dim=8" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sigma": -0.1}, "sigma is -0.1"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"apply_to": "all"}, "apply_to is 'all'"),
        ({"covariance": "full"}, "covariance is 'full'"),
        ({"covariance": "low_rank(9)"}, "r from 1 to 8"),
        ({"convention": "code"}, "convention is 'code'"),
        ({"projection": nn.Linear(4, 6)}, "gives 6 features and the positions have 8"),
        ({"projection": None}, "projection is None"),
    ],
)
def test_bad_arguments_are_named(projection, change, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        StochasticPositions(**{"base": SinCosPositions(GRID, DIM), "projection": projection} | change)


class SomebodysMaskedModel(nn.Module):
    """A small transformer that is not ours: a MAE-like decoder with a mask token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.mask_token = nn.Parameter(torch.zeros(24))
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(24, 16)
        self.decoder_embed = nn.Linear(32, 24)
        self.positions = StochasticPositions(SinCosPositions(4, 24), self.decoder_embed)

    def forward(self, patches, visible, masked):
        features = self.embed(torch.gather(patches, 1, visible[..., None].expand(-1, -1, 16)))
        context = self.decoder_embed(features) + self.positions(visible, tokens="context")
        queries = self.mask_token + self.positions(masked)
        decoded = self.decoder(torch.cat([context, queries], dim=1))
        return self.head(decoded[:, -masked.shape[1] :])


def test_three_lines_put_it_into_somebody_elses_model():
    torch.manual_seed(0)
    model = SomebodysMaskedModel()
    patches = torch.randn(2, 16, 16)
    order = torch.rand(2, 16).argsort(1)
    visible, masked = order[:, :6], order[:, 6:]
    wanted = torch.gather(patches, 1, masked[..., None].expand(-1, -1, 16))
    assert not torch.equal(model(patches, visible, masked), model(patches, visible, masked))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(150):
        loss = (model(patches, visible, masked) - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    model.eval()
    assert torch.equal(model(patches, visible, masked), model(patches, visible, masked))
