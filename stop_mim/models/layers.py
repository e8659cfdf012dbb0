"""What encoders and predictors share: initial weights, and how a layer is run."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stop_mim.models.config import Initialisation

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
