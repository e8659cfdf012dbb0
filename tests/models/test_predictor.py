"""What the predictor receives, written out by hand from the paper's formulas."""

import math

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import SinCosPositions, StochasticPositions


def make(sigma=0.25, convention="paper", apply_to="masked", depth=2):
    torch.manual_seed(0)
    projection = context_projection(20, 16)
    torch.nn.init.normal_(projection.bias)
    positions = StochasticPositions(
        SinCosPositions((4, 6), 16), projection, sigma=sigma, convention=convention, apply_to=apply_to
    )
    return Predictor(projection, positions, depth=depth, heads=2)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(3, 5, 20, generator=generator)
    order = torch.rand(3, 24, generator=generator).argsort(1)
    return context, order[:, :5], order[:, 5:13].unflatten(1, (2, 4))


@pytest.mark.parametrize("convention", ["paper", "release"])
def test_tokens_are_those_of_the_paper_or_of_the_release(inputs, convention):
    predictor = make(convention=convention)
    context, context_indices, target_indices = inputs
    seen = []
    predictor.blocks.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    predictor(context, context_indices, target_indices, generator=torch.Generator().manual_seed(7))
    A, b = predictor.projection.weight, predictor.projection.bias
    psi = SinCosPositions((4, 6), 16).table()
    noise_std = 0.5 if convention == "paper" else 0.25
    noise = noise_std * torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(7))
    rest = predictor.mask_token if convention == "paper" else b
    expected_context = context @ A.T + b + psi[context_indices]
    expected_masked = noise @ A.T + psi[target_indices.flatten(0, 1)] + rest
    torch.testing.assert_close(seen[0][:, :5], expected_context.repeat_interleave(2, 0))
    torch.testing.assert_close(seen[0][:, 5:], expected_masked)


def test_shape_and_independence_of_blocks(inputs):
    predictor = make(sigma=0.0)
    context, context_indices, target_indices = inputs
    both = predictor(context, context_indices, target_indices)
    assert both.shape == (3, 2, 4, 20)
    alone = predictor(context, context_indices, target_indices[:, 1:])
    torch.testing.assert_close(both[:, 1:], alone)


def test_noise_moves_predictions_in_training_only(inputs):
    predictor = make()
    assert not torch.equal(predictor(*inputs), predictor(*inputs))
    predictor.eval()
    assert torch.equal(predictor(*inputs), predictor(*inputs))


def test_silencing_A_silences_the_context(inputs):
    predictor = make().eval()
    torch.nn.init.zeros_(predictor.projection.weight)
    other = (torch.randn_like(inputs[0]), *inputs[1:])
    assert torch.equal(predictor(*inputs), predictor(*other))


def test_release_has_no_learned_mask_token(inputs):
    predictor = make(convention="release")
    assert not predictor.mask_token.requires_grad
    predictor(*inputs).sum().backward()
    assert make().mask_token.requires_grad


def test_residual_branches_are_scaled_and_the_projection_is_left_alone():
    torch.manual_seed(0)
    projection = context_projection(20, 64)
    before = projection.weight.clone()
    predictor = Predictor(projection, SinCosPositions(4, 64), depth=4, heads=2)
    assert torch.equal(projection.weight, before)
    for depth, block in enumerate(predictor.blocks, start=1):
        assert block.mlp.fc2.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * depth), rel=0.1)


def test_misfits_are_named():
    with pytest.raises(InputError, match=r"predictor.heads is 3"):
        Predictor(context_projection(20, 16), SinCosPositions(4, 16), heads=3)
    with pytest.raises(InputError, match="positions have 8 features and the predictor 16"):
        Predictor(context_projection(20, 16), SinCosPositions(4, 8), heads=2)
