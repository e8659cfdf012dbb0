"""What encoder and predictor do with their transformer layers: initialise them, and run them."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def initialise_transformer(parts: Iterable[nn.Module], blocks: Iterable[Any], std: float = 0.02) -> None:
    """Draw truncated normal weights for all linear layers of `parts`, and scale the residual branches of `blocks` by depth.

    Layer l (from 1) has the last weight of both branches divided by √(2l), so that the sum of all branches has the same
    scale at any depth. Both are one function because drawing a second time would undo the scaling.
    """
    for layer in (layer for part in parts for layer in part.modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Patches have unit variance and must keep it: with a fixed small std, positions would dominate small patches,
            # and the first targets, features of this network, would depend on positions alone.
            is_patch_projection = isinstance(layer, nn.Conv2d)
            fan_in = layer.weight[0].numel()
            nn.init.trunc_normal_(layer.weight, std=1 / math.sqrt(fan_in) if is_patch_projection else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    with torch.no_grad():
        for depth, block in enumerate(blocks, start=1):
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
