"""What encoders and predictors share: initial weights, how a layer is run, and checks of what they are asked for."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stop_mim.errors import InputError
from stop_mim.models.config import Initialisation
from stop_mim.positions import Grid

Pool = Literal["mean", "cls"]
Images = Float[Tensor, "batch 3 height width"]


def initialise_transformer(
    parts: Iterable[nn.Module], blocks: Iterable[Any], initialisation: Initialisation = "scaled", std: float = 0.02
) -> None:
    """Draw truncated normal weights for all linear layers of `parts`, and scale the residual branches of `blocks` by depth.

    Layer l (from 1) has the last weight of both branches divided by √(2l), so that the sum of all branches has the same
    scale at any depth. "release" leaves all weights as they are drawn, with the same std, as the released code does.
    """
    released = initialisation == "release"
    for layer in (layer for part in parts for layer in part.modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Patches have unit variance and must keep it: with a fixed small std, positions would dominate small patches,
            # and the first targets, features of this network, would depend on positions alone.
            keeps_variance = isinstance(layer, nn.Conv2d) and not released
            fan_in = layer.weight[0].numel()
            nn.init.trunc_normal_(layer.weight, std=1 / math.sqrt(fan_in) if keeps_variance else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    with torch.no_grad():
        for depth, block in enumerate([] if released else blocks, start=1):
            for branch_end in (block.attn.proj, block.mlp.fc2):
                branch_end.weight.div_(math.sqrt(2 * depth))


def run_layer(
    layer: nn.Module, tokens: Float[Tensor, "batch n dim"], recompute: bool, *arguments: Any
) -> Float[Tensor, "batch m dim"]:
    """Call a layer; with `recompute`, keep only its input and compute the rest again for the gradient."""
    if recompute and torch.is_grad_enabled():
        # The layers draw no random numbers, and a CUDA graph cannot save the state of a generator.
        return checkpoint(layer, tokens, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(tokens, *arguments)


def patch_grid(images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]) -> Grid:
    """Return rows and columns of patches of images of this size."""
    height, width = images.shape[-2:]
    if height % patch_size[0] or width % patch_size[1]:
        raise InputError(
            f"Images of {height}x{width} pixels cannot be cut into patches of {patch_size[0]}x{patch_size[1]}: resize them "
            "to multiples of the patch size."
        )
    return height // patch_size[0], width // patch_size[1]


def pool_tokens(tokens: Float[Tensor, "batch n dim"], n_patches: int, pool: Pool) -> Float[Tensor, "batch dim"]:
    """Return the class token, which is the first one, or the mean of the patches, which are the last ones."""
    return tokens[:, 0] if pool == "cls" else tokens[:, tokens.shape[1] - n_patches :].mean(1)


def require_layers(layers: int, depth: int) -> None:
    """Raise InputError unless an encoder of this depth has so many layers."""
    if not 1 <= layers <= depth:
        raise InputError(f"layers is {layers}: this encoder has {depth} layers, choose 1 to {depth}.")
