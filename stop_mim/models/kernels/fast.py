"""`use_fast_kernels`: the one place where a model is changed to run faster and compute the same, up to rounding."""

import torch
from timm.layers import Attention

from stop_mim.models.ijepa import IJEPA
from stop_mim.models.kernels.frozen_forward import frozen_tokens, has_frozen_forward
from stop_mim.models.kernels.short_attention import ShortAttention, is_plain_attention
from stop_mim.models.objective import Objective


def is_half(precision: str, device: torch.device) -> bool:
    """Return whether `speed.precision` means bf16 on this device."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def use_fast_kernels(
    objective: Objective, precision: str, device: torch.device, recompute: bool = False, calls_layers: bool = False
) -> Objective:
    """Return the objective with faster parts in place of some, with the same weights and names of weights.

    In bf16 on a GPU, attention runs in one kernel for short sequences, and I-JEPA's target encoder runs in bf16 throughout
    with its last layer for target patches only.

    Args:
        objective: its parts are replaced in place.
        precision: "auto", "bf16" or "fp32".
        device: where it trains.
        recompute: keep no activations inside layers and compute them again for the gradient: less memory, slower.
        calls_layers: whether layers must be called as modules, because hooks gather their weights.
    """
    if device.type == "cuda" and is_half(precision, device):
        if isinstance(objective, IJEPA) and not calls_layers and has_frozen_forward(objective.target):
            objective.tokens_at = frozen_tokens
        for module in list(objective.modules()):
            attention = getattr(module, "attn", None)
            if type(attention) is Attention and is_plain_attention(attention):
                module.attn = ShortAttention(attention)
    for module in objective.modules():
        if hasattr(module, "recompute"):
            module.recompute = recompute  # type: ignore[assignment]
    return objective
