"""The predictor: a narrow transformer from context and masked tokens to features of the masked patches."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.models.config import Initialisation
from stop_mim.models.encoder import initialise_transformer, run_layer
from stop_mim.positions import PROJECTION_INIT_STD, Positions, StochasticPositions


class Noise(NamedTuple):
    """Standard normal noise for the positions of context and masked tokens; None where there is none."""

    context: Float[Tensor, "batch n_context noise_dim"] | None
    masked: Float[Tensor, "batch_times_blocks n_target noise_dim"] | None


def context_projection(encoder_dim: int, width: int) -> nn.Linear:
    """Return a new layer from the encoder's features to the predictor's tokens: its weight is the paper's A."""
    projection = nn.Linear(encoder_dim, width)
    nn.init.trunc_normal_(projection.weight, std=PROJECTION_INIT_STD)
    nn.init.zeros_(projection.bias)
    return projection


class MaskedTokens(nn.Module):
    """Makes the paper's two kinds of tokens: context tokens c = A s + b + ψ and masked tokens m = ψ̂ + m̃.

    Args:
        projection: the layer with weight A and bias b.
        positions: returns ψ̂; its `adds_mask_token` says whether m̃ is added.
    """

    def __init__(self, projection: nn.Linear, positions: Positions) -> None:
        super().__init__()
        if positions.dim != projection.out_features:
            raise InputError(
                f"The positions have {positions.dim} features and the projection {projection.out_features}: make them equal."
            )
        if isinstance(positions, StochasticPositions) and positions.projection not in (None, projection):
            raise InputError(
                "The positions were made with another projection layer: pass the same layer to both, so that noise and context "
                "share A."
            )
        self.projection, self.positions = projection, positions
        self.mask_token = nn.Parameter(torch.zeros(positions.dim), requires_grad=positions.adds_mask_token)
        if positions.adds_mask_token:
            nn.init.trunc_normal_(self.mask_token, std=PROJECTION_INIT_STD)

    def tokens(
        self,
        context: Float[Tensor, "batch n_tokens features"],
        context_indices: Int[Tensor, "batch n_context"],
        target_indices: Int[Tensor, "batch n_blocks n_target"],
        noise: Noise | None = None,
    ) -> Float[Tensor, "batch_times_blocks n_tokens_and_target width"]:
        """Return the context tokens, then the masked tokens, of each target block."""
        context_noise, masked_noise = noise or (None, None)
        context_positions = self.positions(context_indices, tokens="context", noise=context_noise)
        # Prefix tokens, such as a class token, have no position.
        if n_prefix := context.shape[1] - context_indices.shape[1]:
            context_positions = F.pad(context_positions, (0, 0, n_prefix, 0))
        context_tokens = self.projection(context) + context_positions
        masked_tokens = self.positions(target_indices.flatten(0, 1), tokens="masked", noise=masked_noise)
        if self.positions.adds_mask_token:
            masked_tokens = masked_tokens + self.mask_token
        repeated = context_tokens.repeat_interleave(target_indices.shape[1], dim=0)
        return torch.cat([repeated, masked_tokens.to(repeated)], dim=1)


class LastBlock(Block):
    """A timm layer, without layer scale and drop path, whose MLP runs only for the last `n_wanted` tokens."""

    def forward(self, x: Float[Tensor, "batch n width"], n_wanted: int) -> Float[Tensor, "batch n_wanted width"]:
        """Return the last `n_wanted` tokens after the layer."""
        first = x.shape[1] - n_wanted
        wanted = x[:, first:] + self.attn(self.norm1(x))[:, first:]
        return wanted + self.mlp(self.norm2(wanted))


class Predictor(MaskedTokens):
    """Predicts the features of masked patches from context tokens and masked tokens, each target block on its own.

    Args:
        projection: the layer from encoder to predictor, with the paper's A as its weight.
        positions: positions of context and masked tokens.
        depth: number of layers.
        heads: number of attention heads.
        outputs: number of predicted values per patch; by default the width of the encoder.
        initialisation: as in `initialise_transformer`.
    """

    recompute = False
    """Whether activations are recomputed for the gradient instead of kept; see `use_fast_kernels`."""

    def __init__(
        self,
        projection: nn.Linear,
        positions: Positions,
        depth: int = 6,
        heads: int = 12,
        outputs: int | None = None,
        initialisation: Initialisation = "scaled",
    ) -> None:
        super().__init__(projection, positions)
        width = projection.out_features
        if width % heads:
            raise InputError(f"predictor.heads is {heads}: the predictor's width, {width}, must be a multiple of it.")
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True) for _ in range(depth - 1))
        self.blocks.append(LastBlock(width, heads, qkv_bias=True))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, outputs or projection.in_features)
        initialise_transformer([self.blocks, self.head], self.blocks, initialisation)

    def forward(
        self,
        context: Float[Tensor, "batch n_tokens encoder_dim"],
        context_indices: Int[Tensor, "batch n_context"],
        target_indices: Int[Tensor, "batch n_blocks n_target"],
        noise: Noise | None = None,
    ) -> Float[Tensor, "batch n_blocks n_target outputs"]:
        """Return the predictions for every target block.

        Args:
            context: features of prefix tokens, if there are any, then of the context patches.
            context_indices: which patches they are of.
            target_indices: the patches to predict.
            noise: noise of the positions; by default they draw it themselves, in training.
        """
        n_blocks, n_target = target_indices.shape[1:]
        tokens = self.tokens(context, context_indices, target_indices, noise)
        *others, last = self.blocks
        for block in others:
            tokens = run_layer(block, tokens, self.recompute)
        predicted = run_layer(last, tokens, self.recompute, n_target)
        return self.head(self.norm(predicted)).unflatten(0, (-1, n_blocks))
