"""The predictor: a narrow transformer from context and masked tokens to the features of the targets."""

from typing import Any

import torch
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.models.initialisation import initialise_transformer
from stop_mim.models.shared_attention import SharedContext, SharedContextAttention
from stop_mim.positions import PROJECTION_INIT_STD, Positions


def context_projection(encoder_dim: int, width: int) -> nn.Linear:
    """A new layer that carries the encoder's features into the predictor: its weight is the paper's A."""
    projection = nn.Linear(encoder_dim, width)
    nn.init.trunc_normal_(projection.weight, std=PROJECTION_INIT_STD)
    nn.init.zeros_(projection.bias)
    return projection


class LastBlock(Block):
    """timm's layer, whose second half works for the last tokens alone: nobody asks for the others any more."""

    def forward(
        self,
        x: Float[Tensor, "batch n width"],
        attn_mask: Any = None,
        is_causal: bool = False,
        n_wanted: int | None = None,
    ) -> Float[Tensor, "batch n_wanted width"]:
        """The last `n_wanted` tokens after the layer; not given: all."""
        first = 0 if n_wanted is None else x.shape[1] - n_wanted
        attended = self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        wanted = x[:, first:] + attended[:, first:]
        return wanted + self.drop_path2(self.ls2(self.mlp(self.norm2(wanted))))


class PredictorBlocks(nn.Sequential):
    """The layers: tokens in, the last tokens out."""

    def forward(  # type: ignore[override]
        self, tokens: Float[Tensor, "batch n width"], n_wanted: int, layout: SharedContext | None = None
    ) -> Float[Tensor, "batch n_wanted width"]:
        """The last `n_wanted` tokens after all layers; `layout` tells blocks that share a context."""
        *others, last = self
        for block in others:
            tokens = block(tokens, attn_mask=layout)
        return last(tokens, attn_mask=layout, n_wanted=n_wanted)


class Predictor(nn.Module):
    """Context tokens c = A s + b + ψ and masked tokens m = ψ̂ + m̃ in, features of the masked patches out.

    The `positions` decide what ψ̂ is, and whether m̃ is added; each target block is predicted on its own.

    `shared_context`: context tokens attend to context tokens alone, and so are the same for all blocks of an image and
    computed once. Ours, not the paper's: there each block's masked tokens change the context tokens that they see.
    """

    def __init__(
        self,
        projection: nn.Linear,
        positions: Positions,
        depth: int = 6,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        shared_context: bool = False,
    ) -> None:
        super().__init__()
        width = projection.out_features
        if width % heads:
            raise InputError(f"predictor.heads is {heads}: the predictor's width, {width}, must be a multiple of it.")
        if positions.dim != width:
            raise InputError(f"The positions have {positions.dim} features and the predictor {width}: make them equal.")
        kinds = [*[Block] * (depth - 1), LastBlock]
        self.blocks = PredictorBlocks(*(kind(width, heads, mlp_ratio, qkv_bias=True) for kind in kinds))
        if shared_context:
            for block in self.blocks:
                block.attn = SharedContextAttention(width, heads, qkv_bias=True)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, projection.in_features)
        initialise_transformer(self, self.blocks)
        self.projection = projection
        self.positions = positions
        self.shared_context = shared_context
        self.mask_token = nn.Parameter(torch.zeros(width), requires_grad=positions.adds_mask_token)
        if positions.adds_mask_token:
            nn.init.trunc_normal_(self.mask_token, std=PROJECTION_INIT_STD)

    def forward(
        self,
        context: Float[Tensor, "batch n_context encoder_dim"],
        context_indices: Int[Tensor, "batch n_context"],
        target_indices: Int[Tensor, "batch n_blocks n_target"],
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch n_blocks n_target encoder_dim"]:
        """Predicted features of every target block."""
        n_blocks = target_indices.shape[1]
        context_positions = self.positions(context_indices, tokens="context", context=context, generator=generator)
        context_tokens = self.projection(context) + context_positions
        masked_tokens = self.positions(
            target_indices.flatten(0, 1), tokens="masked", context=context, generator=generator
        )
        if self.positions.adds_mask_token:
            masked_tokens = masked_tokens + self.mask_token
        masked_tokens = masked_tokens.to(context_tokens).unflatten(0, (-1, n_blocks))
        return self.head(self.norm(self._transform(context_tokens, masked_tokens)))

    def _transform(
        self,
        context_tokens: Float[Tensor, "batch n_context width"],
        masked_tokens: Float[Tensor, "batch n_blocks n_target width"],
    ) -> Float[Tensor, "batch n_blocks n_target width"]:
        """What the layers make of the masked tokens of every block."""
        n_blocks, n_target = masked_tokens.shape[1:3]
        if self.shared_context:
            layout = SharedContext(context_tokens.shape[1], n_blocks, n_target)
            tokens = torch.cat([context_tokens, masked_tokens.flatten(1, 2)], dim=1)
            return self.blocks(tokens, n_blocks * n_target, layout).unflatten(1, (n_blocks, n_target))
        repeated = context_tokens.repeat_interleave(n_blocks, dim=0)
        tokens = torch.cat([repeated, masked_tokens.flatten(0, 1)], dim=1)
        return self.blocks(tokens, n_target).unflatten(0, (-1, n_blocks))
