"""The predictor: a narrow transformer from context and masked tokens to the features of the targets."""

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
        self.blocks = nn.Sequential(*(Block(width, heads, mlp_ratio, qkv_bias=True) for _ in range(depth)))
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
        if not self.shared_context:
            repeated = context_tokens.repeat_interleave(n_blocks, dim=0)
            tokens = self.blocks(torch.cat([repeated, masked_tokens.flatten(0, 1)], dim=1))
            return tokens[:, -n_target:].unflatten(0, (-1, n_blocks))
        layout = SharedContext(context_tokens.shape[1], n_blocks, n_target)
        tokens = torch.cat([context_tokens, masked_tokens.flatten(1, 2)], dim=1)
        for block in self.blocks:
            tokens = block(tokens, attn_mask=layout)
        return tokens[:, layout.n_context :].unflatten(1, (n_blocks, n_target))
