"""The target encoder's own forward pass gives what the plain one gives, as closely as its precision allows."""

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from stop_mim.models.encoder import Dimensions, Encoder, create_encoder, gather_patches
from stop_mim.models.kernels.frozen_forward import frozen_tokens, has_frozen_forward

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
        (SMALL, (48, 64)),
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


def test_it_is_the_same_under_autocast_and_learns_nothing():
    encoder = make_encoder().requires_grad_(True)
    images, indices = images_and_indices((32, 48))
    plain = frozen_tokens(encoder, images, indices)
    with torch.autocast("cpu", torch.bfloat16):
        under = frozen_tokens(encoder, images, indices)
    assert torch.equal(plain, under)
    assert not plain.requires_grad
    assert all(parameter.dtype == torch.float32 for parameter in encoder.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": True},
        {"class_token": False, "reg_tokens": 2},
        {"class_token": False, "init_values": 0.1},
        {"class_token": False, "qk_norm": True},
        {"class_token": False, "pre_norm": True},
        {"class_token": False, "qkv_bias": False},
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
    assert has_frozen_forward(make_encoder())
    assert not has_frozen_forward(Encoder(vit))


@pytest.mark.gpu
def test_on_a_gpu_it_is_as_close():
    encoder = make_encoder(Dimensions(192, 4, 3), image_size=(64, 64)).cuda()
    images, indices = (part.cuda() for part in images_and_indices((64, 64), n=16, batch=16))
    expected, found = gather_patches(encoder(images), indices), frozen_tokens(encoder, images, indices)
    assert similarity(found, expected) > 0.999
    assert (found.float() - expected).norm() < 0.03 * expected.norm()
