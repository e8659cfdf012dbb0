"""What the predictor receives, written out by hand from the paper's formulas."""

import math

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import JitteredPositions, NoiseScale, SinCosPositions, StochasticPositions, sincos_positions


def make(sigma=0.25, convention="paper", apply_to="masked", depth=2, noise_scale=None, shared_context=False):
    torch.manual_seed(0)
    projection = context_projection(20, 16)
    torch.nn.init.normal_(projection.bias)
    positions = StochasticPositions(
        SinCosPositions((4, 6), 16), projection, sigma, apply_to, convention=convention, noise_scale=noise_scale
    )
    return Predictor(projection, positions, depth=depth, heads=2, shared_context=shared_context)


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


def tokens_of(predictor, inputs, seed=7):
    """What the layers are given: context tokens, and masked tokens."""
    seen = []
    predictor.blocks.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    predictor(*inputs, generator=torch.Generator().manual_seed(seed))
    return seen[0][:, :5], seen[0][:, 5:]


def test_conditioned_noise_has_the_scale_of_its_image_in_every_block(inputs):
    context, context_indices, target_indices = inputs
    predictor = make(noise_scale=NoiseScale(20))
    torch.nn.init.normal_(predictor.positions.noise_scale.weight)
    psi, A = SinCosPositions((4, 6), 16).table(), predictor.projection.weight
    heads = context.mean(1) @ predictor.positions.noise_scale.weight[0]
    free = 2.0 ** (heads - heads.mean()).tanh()
    scales = free / free.square().mean().sqrt()
    noise = 0.5 * torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(7))
    scaled = (noise.unflatten(0, (3, 2)) * scales[:, None, None, None]).flatten(0, 1)
    seen_context, seen_masked = tokens_of(predictor, inputs)
    torch.testing.assert_close(seen_masked, scaled @ A.T + psi[target_indices.flatten(0, 1)] + predictor.mask_token)
    expected_context = context @ A.T + predictor.projection.bias + psi[context_indices]
    torch.testing.assert_close(seen_context, expected_context.repeat_interleave(2, 0))
    assert scales.max() > 1.2 * scales.min()


def test_jittered_tokens_are_those_of_other_places(inputs):
    torch.manual_seed(0)
    predictor = Predictor(context_projection(20, 16), JitteredPositions((4, 6), 16, scale=0.3), depth=1, heads=2)
    shifts = 0.3 * torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(7))
    rows, columns = (inputs[2] // 6).flatten(0, 1) + shifts[..., 0], (inputs[2] % 6).flatten(0, 1) + shifts[..., 1]
    seen_context, seen_masked = tokens_of(predictor, inputs)
    torch.testing.assert_close(seen_masked, sincos_positions(rows, columns, 16) + predictor.mask_token)
    expected_context = predictor.projection(inputs[0]) + predictor.positions.table()[inputs[1]]
    torch.testing.assert_close(seen_context, expected_context.repeat_interleave(2, 0))


def test_one_process_of_many_never_waits_for_the_noise_to_learn(inputs, tmp_path):
    kinds = {
        "conditioned": make(noise_scale=NoiseScale(20)),
        "silent": make(sigma=0.0, noise_scale=NoiseScale(20)),
        "jittered": Predictor(
            context_projection(20, 16), JitteredPositions((4, 6), 16, learned=True), depth=1, heads=2
        ),
    }
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for predictor in kinds.values():
            shared = torch.nn.parallel.DistributedDataParallel(predictor)
            # A parameter that was left out of one step is an error in the next.
            for _ in range(3):
                shared(*inputs).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_shape_and_independence_of_blocks(inputs):
    predictor = make(sigma=0.0)
    context, context_indices, target_indices = inputs
    both = predictor(context, context_indices, target_indices)
    assert both.shape == (3, 2, 4, 20)
    alone = predictor(context, context_indices, target_indices[:, 1:])
    torch.testing.assert_close(both[:, 1:], alone)


@pytest.mark.parametrize("n_wanted", [1, 4, 9])
def test_the_last_layer_leaves_out_only_what_nobody_asks_for(n_wanted):
    blocks = make(depth=3).blocks
    tokens = torch.randn(2, 9, 16)
    everything = tokens
    for block in blocks:
        everything = block(everything)
    torch.testing.assert_close(blocks(tokens, n_wanted), everything[:, -n_wanted:], atol=1e-6, rtol=1e-5)


def make_shared(**options):
    """With layers that do something: at their initial size attention is nearly the mean."""
    predictor = make(shared_context=True, **options)
    for parameter in predictor.blocks.parameters():
        parameter.data.mul_(5)
    return predictor


def test_blocks_that_share_a_context_are_predicted_as_each_alone(inputs):
    predictor = make_shared(sigma=0.0, depth=3)
    context, context_indices, target_indices = inputs
    both = predictor(context, context_indices, target_indices)
    assert both.shape == (3, 2, 4, 20)
    for block in range(2):
        alone = predictor(context, context_indices, target_indices[:, block : block + 1])
        torch.testing.assert_close(both[:, block : block + 1], alone, atol=1e-5, rtol=1e-4)


def layer_outputs(predictor, inputs):
    """The tokens of all patches before the last layer: five of the context, then four and four masked ones."""
    seen = []
    hook = predictor.blocks[-2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    predicted = predictor(*inputs)
    hook.remove()
    return seen[0], predicted.detach()


def test_what_is_masked_changes_neither_a_shared_context_nor_other_blocks(inputs):
    predictor = make_shared(sigma=0.0, depth=3)
    context, context_indices, target_indices = inputs
    other = target_indices.clone()
    other[:, 0] = (other[:, 0] + 7) % 24
    tokens, predicted = layer_outputs(predictor, inputs)
    other_tokens, other_predicted = layer_outputs(predictor, (context, context_indices, other))
    assert tokens.shape == (3, 5 + 8, 16)
    assert torch.equal(tokens[:, :5], other_tokens[:, :5])
    assert torch.equal(predicted[:, 1], other_predicted[:, 1])
    assert not torch.allclose(predicted[:, 0], other_predicted[:, 0], atol=1e-3)


def test_masked_tokens_see_a_shared_context_and_their_own_block(inputs):
    predictor = make_shared(sigma=0.0, depth=1)
    context, context_indices, target_indices = inputs
    before = predictor(*inputs)
    other = target_indices.clone()
    other[:, 0, 0] = (other[:, 0, 0] + 5) % 24
    after = predictor(context, context_indices, other)
    # The other tokens of the block see the one that has moved.
    assert ((before - after)[:, 0, 1:].norm(dim=-1) > 1e-3).all()
    moved = context.clone()
    moved[:, 0] *= -20
    assert ((before - predictor(moved, context_indices, target_indices)).norm(dim=-1) > 1e-3).all()


def test_gradients_reach_a_shared_context_and_everything_that_learns(inputs):
    predictor = make_shared()
    context = inputs[0].clone().requires_grad_()
    predictor(context, *inputs[1:]).square().mean().backward()
    assert (context.grad.norm(dim=-1) > 0).all()
    assert all(p.grad is not None and p.grad.any() for p in predictor.parameters() if p.requires_grad)


def test_one_layer_with_a_shared_context_is_the_plain_one(inputs):
    # In the first layer masked tokens see the same as ever; what differs is what the context becomes for the second.
    for depth, same in ((1, True), (2, False)):
        shared = make_shared(sigma=0.0, depth=depth)
        plain = make(sigma=0.0, depth=depth)
        plain.load_state_dict(shared.state_dict())
        assert torch.allclose(shared(*inputs), plain(*inputs), atol=1e-5) == same


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
