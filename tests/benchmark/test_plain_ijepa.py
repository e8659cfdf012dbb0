"""The plain I-JEPA computes what ours does, so that a comparison of their speed is one of the same work."""

import sys
from pathlib import Path

import pytest
import torch

from stop_mim.benchmark.flops import TokenCounts
from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, MaskConfig, PositionsConfig, PredictorConfig, TrainConfig

FOLDER = Path(__file__).parents[2] / "benchmarks"
CONFIG = TrainConfig(
    encoder=EncoderConfig("tiny", image_size=(48, 64), patch_size=8, width=32, depth=3, heads=2),
    predictor=PredictorConfig(width=16, depth=2),
    positions=PositionsConfig(kind="sincos"),
)


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield pytest.importorskip("plain_ijepa", reason="needs the benchmarks folder of a clone")
    sys.modules.pop("plain_ijepa")


def copied(ours, plain):
    """The plain model with the weights of ours."""
    model = plain.build_plain(CONFIG)
    for theirs, encoder in ((model.encoder, ours.encoder), (model.target, ours.target)):
        weights = {
            name.replace("patch_embed.proj", "patches"): value for name, value in encoder.vit.state_dict().items()
        }
        theirs.load_state_dict({name: value for name, value in weights.items() if name != "pos_embed"})
    names = model.predictor.state_dict().keys()
    weights = ours.predictor.state_dict()
    model.predictor.load_state_dict({name: weights[name] for name in names})
    return model


def disturb(module):
    """Weights and biases unlike those at the start, where much is zero or the same in all layers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module


def test_loss_gradients_and_target_are_ours(plain):
    torch.manual_seed(0)
    ours = disturb(build_objective(CONFIG))
    # The encoders' positions are fixed, in the plain model by a formula.
    for encoder in (ours.encoder, ours.target):
        encoder.vit.pos_embed.data.copy_(build_objective(CONFIG).encoder.vit.pos_embed)
    theirs = copied(ours, plain)
    images = torch.randn(4, 3, *CONFIG.encoder.image_size)
    masks = build_masks(CONFIG.masks, ours.encoder.grid).sample(4)
    loss, other = ours(images, masks), theirs(images, masks)
    assert loss.item() > 0.05
    assert torch.allclose(loss, other, atol=1e-5, rtol=0)
    loss.backward()
    other.backward()
    pairs = [
        (ours.encoder.vit.patch_embed.proj, theirs.encoder.patches),
        (ours.encoder.vit.blocks[1].attn.qkv, theirs.encoder.blocks[1].attn.qkv),
        (ours.predictor.projection, theirs.predictor.projection),
        (ours.predictor.head, theirs.predictor.head),
    ]
    for one, another in pairs:
        assert one.weight.grad.abs().max() > 0
        assert torch.allclose(one.weight.grad, another.weight.grad, atol=1e-5)
    assert torch.allclose(ours.predictor.mask_token.grad, theirs.predictor.mask_token.grad, atol=1e-5)
    ours.move_target(0.1)
    theirs.update_target(0.9)
    assert torch.allclose(ours.target.vit.norm.weight, theirs.target.norm.weight)
    assert not torch.equal(theirs.target.norm.weight, theirs.encoder.norm.weight)


@pytest.mark.parametrize("masks", [MaskConfig(), MaskConfig(n_blocks=2, context_tokens=9, target_tokens=4)])
def test_the_collator_draws_masks_of_our_sizes(plain, masks):
    grid = (6, 8)
    ours = build_masks(masks, grid).sample(16)
    counts = TokenCounts.of(ours, grid)
    collator = plain.PlainCollator(masks, grid, counts, batch_size=16)
    drawn = collator()
    assert drawn.context.shape == ours.context.shape
    assert drawn.targets.shape == ours.targets.shape
    for context, blocks in zip(drawn.context.tolist(), drawn.targets.tolist(), strict=True):
        assert context == sorted(set(context))
        assert not set(context) & set().union(*blocks)
        assert all(block == sorted(set(block)) for block in blocks)
        assert min(context) >= 0
        assert max(context) < 48
    assert not torch.equal(drawn.context, collator().context)
