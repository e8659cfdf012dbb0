"""A bf16 forward pass for an encoder that gets no gradient, such as the target encoder.

Unlike the plain forward pass under autocast, weights and tokens are bf16 throughout, GELU is fused into the matrix
product (in its tanh form, whose error is below the precision of bf16), and the last layer and norm run for the wanted
patches only.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from stop_mim.models.encoder import Encoder, Images, cut_patches, gather_patches
from stop_mim.models.encoder_file import peculiarity
from stop_mim.models.kernels.short_attention import attend


def has_frozen_forward(encoder: Encoder) -> bool:
    """Return whether `frozen_tokens` supports the encoder: a plain Vision Transformer without prefix tokens."""
    has_biases = encoder.vit.blocks[0].attn.qkv.bias is not None
    return not encoder.vit.num_prefix_tokens and has_biases and peculiarity(encoder) is None


@torch.no_grad()
def frozen_tokens(encoder: Encoder, images: Images, indices: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n dim"]:
    """Return normed tokens of the patches with these indices, in bf16; the encoder sees the whole image."""
    with torch.autocast(images.device.type, enabled=False):
        tokens = _embed(encoder, images.bfloat16())
        for block in encoder.vit.blocks[:-1]:
            tokens = _layer(block, tokens)
        return _norm(encoder.vit.norm, _last_layer(encoder.vit.blocks[-1], tokens, indices))


def _embed(encoder: Encoder, images: Images) -> Float[Tensor, "batch n dim"]:
    projection = encoder.vit.patch_embed.proj
    patches = cut_patches(images, encoder.patch_size)
    embedded = F.linear(patches, projection.weight.flatten(1).bfloat16(), projection.bias.bfloat16())
    return embedded + encoder.positions_for(images).bfloat16()


def _layer(block: Block, tokens: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
    attended = attend(_linear(block.attn.qkv, _norm(block.norm1, tokens)), block.attn.num_heads)
    tokens = tokens + _linear(block.attn.proj, attended)
    return tokens + _mlp(block, tokens)


def _last_layer(
    block: Block, tokens: Float[Tensor, "batch n dim"], indices: Int[Tensor, "batch m"]
) -> Float[Tensor, "batch m dim"]:
    """Compute keys and values of all patches, and everything else of the wanted ones only."""
    heads = block.attn.num_heads
    q, k, v = _linear(block.attn.qkv, _norm(block.norm1, tokens)).chunk(3, dim=-1)
    q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (gather_patches(q, indices), k, v))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    wanted = gather_patches(tokens, indices) + _linear(block.attn.proj, attended)
    return wanted + _mlp(block, wanted)


def _mlp(block: Block, tokens: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
    normed, first = _norm(block.norm2, tokens), block.mlp.fc1
    hidden = torch._addmm_activation(
        first.bias.bfloat16(), normed.flatten(0, 1), first.weight.bfloat16().t(), use_gelu=True
    )
    return _linear(block.mlp.fc2, hidden.unflatten(0, normed.shape[:2]))


def _norm(norm: nn.LayerNorm, tokens: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
    return F.layer_norm(tokens, tokens.shape[-1:], norm.weight.bfloat16(), norm.bias.bfloat16(), norm.eps)


def _linear(layer: nn.Linear, tokens: Float[Tensor, "batch n inputs"]) -> Float[Tensor, "batch n outputs"]:
    return F.linear(tokens, layer.weight.bfloat16(), layer.bias.bfloat16())
