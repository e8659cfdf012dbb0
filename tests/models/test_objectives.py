"""What all objectives have in common: what learns, where the noise comes from, and kernels that change nothing."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import nn

from stop_mim.errors import InputError
from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.models.encoder_file import save_encoder
from stop_mim.models.kernels.fast import use_fast_kernels
from stop_mim.models.kernels.frozen_forward import frozen_tokens
from stop_mim.models.kernels.short_attention import ShortAttention
from stop_mim.models.mae import MAE
from stop_mim.training.config import (
    EncoderConfig,
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    TrainConfig,
)

BASE = TrainConfig(
    encoder=EncoderConfig("tiny", image_size=(32, 48), patch_size=8, width=48, depth=3, heads=3),
    predictor=PredictorConfig(width=24, depth=2, heads=2),
)
CONFIGS = {
    "ijepa": BASE,
    "mae": replace(BASE, objective=ObjectiveConfig("mae"), masks=MaskConfig("random")),
    "data2vec": replace(BASE, objective=ObjectiveConfig("data2vec", target_layers=2), masks=MaskConfig("blockwise")),
}
EVERY = pytest.mark.parametrize("kind", CONFIGS)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def make(objective, /, seed=0, **positions):
    torch.manual_seed(seed)
    return build_objective(replace(CONFIGS[objective], positions=PositionsConfig(**positions)))


def make_batch(kind, images=4):
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(images, 3, 4, 6, generator=generator)
    sampler = build_masks(CONFIGS[kind].masks, (4, 6))
    return F.interpolate(coarse, (32, 48), mode="bilinear"), sampler.sample(images, generator=generator)


def loss_of(objective, batch, seed=0):
    images, masks = batch
    return objective(images, masks, objective.draw_noise(masks, torch.Generator().manual_seed(seed)))


@EVERY
def test_gradients_reach_everything_that_learns_and_nothing_else(kind):
    model = make(kind)
    loss_of(model, make_batch(kind)).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    fixed = {name for name, _ in model.named_parameters()} - with_gradient
    assert fixed == {name for name in fixed if name.startswith("target.")} | {"encoder.vit.pos_embed"}
    assert bool(fixed - {"encoder.vit.pos_embed"}) == (kind != "mae")


@EVERY
def test_the_generator_decides_the_noise_of_training(kind):
    model, batch = make(kind, sigma=4.0), make_batch(kind)
    nn.init.normal_(model.masked_tokens.projection.weight) if kind != "data2vec" else None
    assert loss_of(model, batch) == loss_of(model, batch) != loss_of(model, batch, seed=1)
    # Without noise that is handed over, it comes from torch's default generator.
    torch.manual_seed(5)
    first = model(*batch)
    torch.manual_seed(5)
    assert model(*batch) == first != model(*batch)
    model.eval()
    assert model.draw_noise(batch[1]).masked is None
    assert loss_of(model, batch) == loss_of(model, batch, seed=1) == model(*batch)


def change_patches(images, indices):
    """Return the images with other pixels in these patches."""
    patches = torch.zeros(len(images), 24).scatter(1, indices.flatten(1), 1.0).unflatten(1, (4, 6))
    changed = patches.repeat_interleave(8, 1).repeat_interleave(8, 2)
    return images + changed[:, None] * torch.linspace(-3, 3, 48)


@EVERY
def test_predictions_depend_on_all_context_patches_and_on_no_target(kind):
    model, (images, masks) = make(kind, sigma=0.0), make_batch(kind)
    before = model.predict(images, masks)
    assert torch.equal(model.predict(change_patches(images, masks.targets), masks), before)
    for patch in (0, -1):
        seen = model.predict(change_patches(images, masks.context[:, [patch]]), masks)
        assert not torch.isclose(seen, before, atol=1e-6).all(-1).any()
    if kind != "mae":
        changed = model.target_features(change_patches(images, masks.targets), masks)
        assert not torch.allclose(changed, model.target_features(images, masks), atol=0.01)


@EVERY
def test_without_noise_stop_is_the_baseline_to_the_bit(kind):
    plain, stop, batch = make(kind, kind="sincos"), make(kind, sigma=0.0), make_batch(kind)
    assert stop.state_dict().keys() == plain.state_dict().keys()
    stop.load_state_dict(plain.state_dict())
    assert torch.equal(loss_of(stop, batch), plain(*batch))


@EVERY
def test_noise_of_context_tokens_is_handed_over_too(kind):
    model, batch = make(kind, sigma=1.0, apply_to="context"), make_batch(kind)
    noise = model.draw_noise(batch[1])
    assert noise.context.shape[:2] == batch[1].context.shape
    assert noise.masked is None
    assert torch.equal(model(*batch, noise), model(*batch, noise))


@pytest.mark.parametrize("kind", ["ijepa", "data2vec"])
def test_the_target_follows_the_encoder_is_kept_and_stays_in_evaluation_mode(kind):
    model = make(kind).train()
    for parameter in model.encoder.parameters():
        parameter.data.add_(1.0)
    before = [parameter.clone() for parameter in model.target.parameters()]
    model.update_target(momentum=0.9)
    for old, new, ours in zip(before, model.target.parameters(), model.encoder.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * ours if ours.requires_grad else old)
    assert model.frozen is model.target
    assert model.encoder.training
    assert not model.target.training


def test_mae_keeps_its_encoder_and_has_no_target():
    model = make("mae")
    before = copy.deepcopy(model.state_dict())
    model.move_target(0.5)
    assert model.frozen is model.encoder
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@EVERY
def test_bfloat16_autocast_needs_no_scaler(kind):
    model, batch = make(kind), make_batch(kind)
    exact = loss_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(model, batch)
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def gradients_of(model, batch):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@EVERY
def test_recomputed_layers_have_the_same_gradients_and_keep_less(kind):
    model, batch, kept = make(kind), make_batch(kind), []
    expected = gradients_of(model, batch)
    use_fast_kernels(model, "fp32", CPU, recompute=False)
    for recompute in (False, True):
        use_fast_kernels(model, "fp32", CPU, recompute=recompute)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            loss_of(model, batch)
        kept.append(sum(saved))
        found = gradients_of(model, batch)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert kept[1] < 0.6 * kept[0]


@EVERY
def test_fast_kernels_take_the_place_of_attention_with_the_same_weights_and_names(kind, tmp_path):
    model, batch = make(kind), make_batch(kind)
    names, expected = list(model.state_dict()), gradients_of(model, batch)
    for _ in range(2):
        use_fast_kernels(model, "auto", GPU)
    attentions = [module.attn for module in model.modules() if hasattr(module, "attn")]
    assert {type(attention) for attention in attentions} == {ShortAttention}
    assert list(model.state_dict()) == names
    save_encoder(model.frozen, tmp_path / "encoder.safetensors")
    if kind == "ijepa":
        assert model.tokens_at is frozen_tokens
        assert model(*batch).item() == pytest.approx(expected["loss"].item(), rel=0.05)
        return
    for name, tensor in gradients_of(model, batch).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("precision", "device"), [("fp32", GPU), ("auto", CPU), ("bf16", CPU)])
def test_other_devices_and_precisions_keep_timms_attention(precision, device):
    model = make("ijepa")
    use_fast_kernels(model, precision, device)
    attentions = [module.attn for module in model.modules() if hasattr(module, "attn")]
    assert {type(attention) for attention in attentions} == {Attention}
    assert model.tokens_at is not frozen_tokens


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("ijepa", lambda images, masks: (F.pad(images, (0, 16)), masks), "images have 32x64 .* made for 32x48"),
        ("mae", lambda images, masks: (images[:, :, :-1], masks), "31x48 pixels cannot be cut"),
        ("data2vec", lambda images, masks: (images, replace(masks, grid=(8, 8))), "masks are for 8x8 .* has 4x6"),
        ("ijepa", lambda images, masks: (images[:3], masks), "3 images and masks for 4"),
        (
            "data2vec",
            lambda images, masks: (images, replace(masks, targets=masks.targets.repeat(1, 2, 1))),
            "2 target blocks and data2vec predicts one",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(kind, change, words):
    with pytest.raises(InputError, match=words):
        make(kind)(*change(*make_batch(kind)))


def test_a_decoder_of_other_patches_is_refused():
    mae = make("mae")
    mae.encoder.patch_size = (4, 4)
    with pytest.raises(InputError, match="has 192 outputs and a patch 48 values: create it with outputs=48"):
        MAE(mae.encoder, mae.decoder)


def test_positions_of_another_grid_are_named():
    model = make("data2vec")
    model.positions.grid = (6, 4)
    with pytest.raises(InputError, match="positions are for 6x4 patches and the encoder has 4x6"):
        model(*make_batch("data2vec"))
