"""The forward pass of an encoder that does not learn, in half precision or less: what a target encoder needs and no more.

Beside the plain forward pass: weights and tokens are bf16 throughout, GELU is computed within the matrix product (by its
tanh form, which is closer to the exact one than bf16 can tell), the last layer works for the wanted patches alone, and so
do the last norms. In fp8 the four matrix products of every layer multiply numbers of eight bits (e4m3).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from stop_mim.models.encoder import Encoder, cut_patches, gather_patches, peculiarity
from stop_mim.models.short_attention import attend, is_plain_attention

FrozenPrecision = Literal["bf16", "fp8"]
LARGEST_FP8 = 448.0


def has_frozen_forward(encoder: Encoder) -> bool:
    """Whether the encoder is a plain Vision Transformer without prefix tokens, which this module knows."""
    vit = encoder.vit
    plain = all(peculiarity(block) is None and _is_plain(block) for block in vit.blocks)
    around = isinstance(vit.norm, nn.LayerNorm) and all(
        isinstance(norm, nn.Identity) for norm in (vit.norm_pre, vit.patch_embed.norm)
    )
    return plain and around and not vit.num_prefix_tokens


def _is_plain(block: Block) -> bool:
    linear = (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)
    extras = (block.ls1, block.ls2, block.mlp.norm)
    return (
        is_plain_attention(block.attn)
        and all(isinstance(extra, nn.Identity) for extra in extras)
        and all(layer.bias is not None for layer in linear)
    )


@torch.no_grad()
def frozen_tokens(
    encoder: Encoder,
    images: Float[Tensor, "batch 3 height width"],
    indices: Int[Tensor, "batch n"],
    precision: FrozenPrecision = "bf16",
) -> Float[Tensor, "batch n dim"]:
    """Normed tokens of the patches with these indices, seen in the whole image."""
    with torch.autocast(images.device.type, enabled=False):
        tokens = _embed(encoder, images.bfloat16())
        for block in encoder.vit.blocks[:-1]:
            tokens = _layer(block, tokens, precision)
        wanted = _last_layer(encoder.vit.blocks[-1], tokens, indices, precision)
        return _norm(encoder.vit.norm, wanted)


def _embed(encoder: Encoder, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch n dim"]:
    projection = encoder.vit.patch_embed.proj
    patches = cut_patches(images, encoder.patch_size)
    embedded = F.linear(patches, projection.weight.flatten(1).bfloat16(), projection.bias.bfloat16())
    return embedded + encoder.positions_for(images).bfloat16()


def _layer(block: Block, tokens: Float[Tensor, "batch n dim"], precision: FrozenPrecision) -> Tensor:
    attended = attend(_linear(block.attn.qkv, _norm(block.norm1, tokens), precision), block.attn.num_heads)
    tokens = tokens + _linear(block.attn.proj, attended, precision)
    return tokens + _mlp(block, tokens, precision)


def _last_layer(
    block: Block, tokens: Float[Tensor, "batch n dim"], indices: Int[Tensor, "batch m"], precision: FrozenPrecision
) -> Float[Tensor, "batch m dim"]:
    """Keys and values of all patches, everything else of the wanted ones alone."""
    heads = block.attn.num_heads
    qkv = _linear(block.attn.qkv, _norm(block.norm1, tokens), precision)
    q, k, v = qkv.chunk(3, dim=-1)
    q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (gather_patches(q, indices), k, v))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    wanted = gather_patches(tokens, indices) + _linear(block.attn.proj, attended, precision)
    return wanted + _mlp(block, wanted, precision)


def _mlp(block: Block, tokens: Float[Tensor, "batch n dim"], precision: FrozenPrecision) -> Tensor:
    normed, first = _norm(block.norm2, tokens), block.mlp.fc1
    if precision == "fp8":
        hidden = F.gelu(_linear(first, normed, precision))
    else:
        flat = torch._addmm_activation(
            first.bias.bfloat16(), normed.flatten(0, 1), first.weight.bfloat16().t(), use_gelu=True
        )
        hidden = flat.unflatten(0, normed.shape[:2])
    return _linear(block.mlp.fc2, hidden, precision)


def _norm(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], norm.weight.bfloat16(), norm.bias.bfloat16(), norm.eps)


def _linear(layer: nn.Linear, tokens: Tensor, precision: FrozenPrecision) -> Tensor:
    weight, bias = layer.weight, layer.bias.bfloat16()
    if precision == "bf16":
        return F.linear(tokens, weight.bfloat16(), bias)
    scale = (weight.abs().amax() / LARGEST_FP8).float()
    product = torch._scaled_mm(
        # Tokens behind a norm, a softmax or a GELU have the size of one: their eight bits need no scale of their own.
        _as_fp8(tokens.flatten(0, 1)),
        _as_fp8(weight / scale).t(),
        scale_a=torch.ones_like(scale),
        scale_b=scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product.unflatten(0, tokens.shape[:2])


def _as_fp8(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
