"""Operations of a training step in matrix products, two per multiplication and addition, as torch counts them.

Recomputed operations, norms, softmax and the optimiser are not counted.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stop_mim.masking import Masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import TrainConfig


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one image."""

    grid: int
    """All patches."""
    context: int
    """Patches of the context."""
    blocks: int
    """Target blocks."""
    target: int
    """Patches of each target block."""

    @staticmethod
    def of(masks: Masks, grid: tuple[int, int]) -> "TokenCounts":
        return TokenCounts(grid[0] * grid[1], masks.context.shape[1], masks.targets.shape[1], masks.targets.shape[2])


def step_flops(config: TrainConfig, counts: TokenCounts, images: int) -> int:
    """Return the operations of a step on a number of images: forward and backward pass, counted on the meta device."""
    # Fused attention would count a product twice, which it recomputes in the backward pass.
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        objective = build_objective(config)
        context = torch.zeros(1, counts.context, dtype=torch.long)
        masks = Masks(context, torch.zeros(1, counts.blocks, counts.target, dtype=torch.long))
        with FlopCounterMode(display=False) as counter:
            objective(torch.zeros(1, 3, *config.encoder.image_size), masks).backward()
    return images * counter.get_total_flops()
