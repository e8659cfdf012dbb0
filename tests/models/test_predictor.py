"""What the predictor receives, written out by hand from the paper's formulas."""

import pytest
import torch
from timm.models.vision_transformer import Block

from stop_mim.errors import InputError
from stop_mim.models.predictor import LastBlock, Noise, Predictor, context_projection
from stop_mim.positions import SinCosPositions, StochasticPositions


def make(sigma=0.25, convention="paper", apply_to="masked", depth=2):
    torch.manual_seed(0)
    projection = context_projection(20, 16)
    torch.nn.init.normal_(projection.bias)
    positions = StochasticPositions(SinCosPositions((4, 6), 16), projection, sigma, apply_to, convention=convention)
    return Predictor(projection, positions, depth=depth, heads=2)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(3, 5, 20, generator=generator)
    order = torch.rand(3, 24, generator=generator).argsort(1)
    return context, order[:, :5], order[:, 5:13].unflatten(1, (2, 4))


def tokens_of(predictor, inputs, seed=7):
    """Context tokens and masked tokens that enter the layers, with the noise of this seed."""
    seen = []
    predictor.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    targets, generator = inputs[2].flatten(0, 1), torch.Generator().manual_seed(seed)
    predictor(*inputs, Noise(None, predictor.positions.draw_noise(targets, generator=generator)))
    return seen[0][:, :5], seen[0][:, 5:]


@pytest.mark.parametrize("convention", ["paper", "release"])
def test_tokens_are_those_of_the_paper_or_of_the_release(inputs, convention):
    predictor = make(convention=convention)
    context, context_indices, target_indices = inputs
    seen_context, seen_masked = tokens_of(predictor, inputs)
    A, b = predictor.projection.weight, predictor.projection.bias
    psi = SinCosPositions((4, 6), 16).table()
    noise_std = 0.5 if convention == "paper" else 0.25
    noise = noise_std * torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(7))
    rest = predictor.mask_token if convention == "paper" else b
    expected_context = context @ A.T + b + psi[context_indices]
    torch.testing.assert_close(seen_context, expected_context.repeat_interleave(2, 0))
    torch.testing.assert_close(seen_masked, noise @ A.T + psi[target_indices.flatten(0, 1)] + rest)


def test_shape_and_independence_of_blocks(inputs):
    predictor = make(sigma=0.0)
    context, context_indices, target_indices = inputs
    both = predictor(context, context_indices, target_indices)
    assert both.shape == (3, 2, 4, 20)
    alone = predictor(context, context_indices, target_indices[:, 1:])
    torch.testing.assert_close(both[:, 1:], alone)


@pytest.mark.parametrize("n_wanted", [1, 9])
def test_the_last_layer_leaves_out_only_what_nobody_asks_for(n_wanted):
    torch.manual_seed(0)
    block, tokens = LastBlock(16, 2, qkv_bias=True), torch.randn(2, 9, 16)
    everything = Block.forward(block, tokens)
    torch.testing.assert_close(block(tokens, n_wanted), everything[:, -n_wanted:], atol=1e-6, rtol=1e-5)


def test_silencing_A_silences_the_context(inputs):
    predictor = make().eval()
    torch.nn.init.zeros_(predictor.projection.weight)
    other = (torch.randn_like(inputs[0]), *inputs[1:])
    assert torch.equal(predictor(*inputs), predictor(*other))


def test_misfits_are_named():
    with pytest.raises(InputError, match=r"predictor.heads is 3"):
        Predictor(context_projection(20, 16), SinCosPositions(4, 16), heads=3)
    with pytest.raises(InputError, match="positions have 8 features and the projection 16"):
        Predictor(context_projection(20, 16), SinCosPositions(4, 8), heads=2)
    positions = StochasticPositions(SinCosPositions(4, 16), context_projection(20, 16))
    with pytest.raises(InputError, match="share A"):
        Predictor(context_projection(20, 16), positions, heads=2)
