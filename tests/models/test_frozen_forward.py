"""The target encoder's own forward pass gives what the plain one gives, as closely as its precision allows."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from stop_mim.masking import MultiBlockMasks
from stop_mim.models import frozen_forward
from stop_mim.models.encoder import Dimensions, Encoder, create_encoder, gather_patches
from stop_mim.models.frozen_forward import frozen_tokens, has_frozen_forward
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import SinCosPositions

SMALL = Dimensions(width=48, depth=2, heads=3)


def make_encoder(dimensions=SMALL, image_size=(32, 48)):
    """With weights that have moved: at their start norms and biases would hide what becomes of them."""
    torch.manual_seed(0)
    encoder = create_encoder(dimensions, image_size=image_size, patch_size=8).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.vit.blocks.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for parameter in encoder.vit.norm.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return encoder


def images_and_indices(size, n=7, batch=3):
    generator = torch.Generator().manual_seed(2)
    patches = size[0] * size[1] // 64
    indices = torch.rand(batch, patches, generator=generator).argsort(1)[:, :n]
    return torch.randn(batch, 3, *size, generator=generator), indices


def similarity(ours, theirs):
    return F.cosine_similarity(ours.float(), theirs.float(), dim=-1).min().item()


@pytest.mark.parametrize(
    ("dimensions", "size"),
    [
        (Dimensions(16, 1, 1), (32, 48)),
        (SMALL, (32, 48)),
        (SMALL, (48, 64)),
        (SMALL, (16, 16)),
        (Dimensions(64, 6, 4), (32, 48)),
        (Dimensions(96, 3, 2, mlp_ratio=2.5), (64, 64)),
    ],
)
def test_tokens_are_those_of_the_plain_forward_pass(dimensions, size):
    encoder = make_encoder(dimensions)
    images, indices = images_and_indices(size, n=3)
    expected = gather_patches(encoder(images), indices)
    found = frozen_tokens(encoder, images, indices)
    assert found.dtype == torch.bfloat16
    assert similarity(found, expected) > 0.999
    # And of their size, which a cosine does not see.
    assert (found.float() - expected).norm() < 0.03 * expected.norm()
    # The test would see tokens of other patches.
    assert similarity(found, gather_patches(encoder(images), indices.roll(1, 1))) < 0.99


def test_the_last_layer_for_some_patches_is_that_for_all():
    encoder = make_encoder()
    images, indices = images_and_indices((32, 48))
    everywhere = torch.arange(24).expand(3, 24)
    found, all_tokens = frozen_tokens(encoder, images, indices), frozen_tokens(encoder, images, everywhere)
    torch.testing.assert_close(found, gather_patches(all_tokens, indices), atol=0.03, rtol=0.02)
    assert similarity(found, gather_patches(all_tokens, indices)) > 0.9999
    repeated = frozen_tokens(encoder, images, indices[:, [0, 0, 3]])
    assert torch.equal(repeated[:, 0], repeated[:, 1])


def test_all_layers_but_the_last_are_computed_whole():
    encoder = make_encoder(replace(SMALL, depth=3))
    images, indices = images_and_indices((32, 48))
    tokens = frozen_forward._embed(encoder, images.bfloat16())
    for block in encoder.vit.blocks:
        tokens = frozen_forward._layer(block, tokens, "bf16")
    whole = gather_patches(frozen_forward._norm(encoder.vit.norm, tokens), indices)
    assert similarity(frozen_tokens(encoder, images, indices), whole) > 0.9999


def test_it_is_the_same_under_autocast_and_learns_nothing():
    encoder = make_encoder().requires_grad_(True)
    images, indices = images_and_indices((32, 48))
    plain = frozen_tokens(encoder, images, indices)
    with torch.autocast("cpu", torch.bfloat16):
        under = frozen_tokens(encoder, images, indices)
    assert torch.equal(plain, under)
    assert not plain.requires_grad
    assert all(parameter.dtype == torch.float32 for parameter in encoder.parameters())


def test_gelu_within_a_product_is_gelu_to_the_precision_of_bf16():
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(64, 32, generator=generator), torch.randn(32, 48, generator=generator)
    bias = torch.randn(48, generator=generator)
    halves = bias.bfloat16(), tokens.bfloat16(), weight.bfloat16()
    found = torch._addmm_activation(*halves, use_gelu=True)
    expected = F.gelu(torch.addmm(*(part.float() for part in halves)))
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.01)


def altered(change):
    encoder = make_encoder()
    change(encoder.vit)
    return has_frozen_forward(encoder)


def test_it_is_for_plain_encoders():
    assert has_frozen_forward(make_encoder())
    assert has_frozen_forward(create_encoder(SMALL, image_size=(32, 32), patch_size=8, drop_path=0.2))


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": True},
        {"class_token": False, "reg_tokens": 2},
        {"class_token": False, "init_values": 0.1},
        {"class_token": False, "qk_norm": True},
        {"class_token": False, "pre_norm": True},
        {"class_token": False, "qkv_bias": False},
        {"class_token": False, "proj_bias": False},
        {"class_token": False, "act_layer": nn.SiLU},
        {"class_token": False, "act_layer": lambda: nn.GELU(approximate="tanh")},
        {"class_token": False, "scale_attn_norm": True},
        {"class_token": False, "scale_mlp_norm": True},
        {"class_token": False, "final_norm": False},
    ],
    ids=lambda options: " ".join(options),
)
def test_encoders_with_anything_else_are_refused(options):
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    try:
        vit = VisionTransformer(**shape, num_classes=0, global_pool="", **options)
    except TypeError:
        pytest.skip(f"this timm has no {options}")
    assert not has_frozen_forward(Encoder(vit))


@pytest.mark.parametrize("name", ["norm_pre", "norm"])
def test_other_norms_around_the_layers_are_refused(name):
    assert not altered(lambda vit: setattr(vit, name, nn.Sequential()))


def make_objective(**options):
    torch.manual_seed(0)
    encoder = make_encoder().requires_grad_(True)
    predictor = Predictor(context_projection(48, 24), SinCosPositions(encoder.grid, 24), depth=1, heads=2)
    return IJEPA(encoder, predictor, **options)


def test_targets_are_close_to_those_without():
    objective = make_objective()
    images, _ = images_and_indices((32, 48))
    masks = MultiBlockMasks((4, 6)).sample(3, generator=torch.Generator().manual_seed(3))
    expected = objective.target_features(images, masks)
    loss = objective(images, masks)
    objective.frozen_precision = "bf16"
    found = objective.target_features(images, masks)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert not torch.equal(found, expected)
    assert similarity(found, expected) > 0.999
    # Layer-normed in full precision, whatever the tokens were.
    torch.testing.assert_close(found.mean(-1), torch.zeros(found.shape[:-1]), atol=1e-5, rtol=0)
    assert objective(images, masks).item() == pytest.approx(loss.item(), rel=0.01)


@pytest.mark.parametrize("options", [{"target_layers": 2}, {"target_resolution": "max"}])
def test_other_targets_are_computed_as_before(options):
    objective = make_objective(**options)
    images, _ = images_and_indices((32, 48))
    masks = MultiBlockMasks((4, 6)).sample(3, generator=torch.Generator().manual_seed(3))
    expected = objective.target_features(images, masks)
    objective.frozen_precision = "bf16"
    assert torch.equal(objective.target_features(images, masks), expected)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)
def test_eight_bits_are_coarser_than_sixteen_and_still_close(device, precision):
    if precision == "fp8" and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies in eight bits")
    encoder = make_encoder(Dimensions(192, 4, 3), image_size=(64, 64)).to(device)
    images, indices = (part.to(device) for part in images_and_indices((64, 64), n=16, batch=16))
    expected = gather_patches(encoder(images), indices)
    found = frozen_tokens(encoder, images, indices, precision)
    assert similarity(found, expected) > (0.999 if precision == "bf16" else 0.99)
    apart = (found.float() - expected).norm() / expected.norm()
    assert apart < 0.03 if precision == "bf16" else 0.03 < apart < 0.12
