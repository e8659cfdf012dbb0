"""Initial weights of encoder and predictor."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def initialise_transformer(module: nn.Module, blocks: Iterable[Any], std: float = 0.02) -> None:
    """Truncated normal weights, and residual branches that shrink with depth.

    Layer l (from 1) has the last weight of its two branches divided by √(2l), so that the sum of all branches has the
    same scale at any depth. It is one function because a second pass of the first part would undo the second.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Pixels come in with unit variance and must leave the patch projection so: a fixed small std would drown small
            # patches in their positions, and the first targets, features of this very network, would be positions alone.
            is_patch_projection = isinstance(layer, nn.Conv2d)
            fan_in = layer.weight[0].numel()
            nn.init.trunc_normal_(layer.weight, std=1 / math.sqrt(fan_in) if is_patch_projection else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    with torch.no_grad():
        for depth, block in enumerate(blocks, start=1):
            for branch_end in (block.attn.proj, block.mlp.fc2):
                branch_end.weight.div_(math.sqrt(2 * depth))
