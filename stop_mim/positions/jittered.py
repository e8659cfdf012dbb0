"""Noise in coordinate space: row and column of a patch are jittered before sine and cosine. Ours, not the paper's."""

import math
from typing import get_args

import torch
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.positions.deterministic import (
    ApplyTo,
    Grid,
    Positions,
    SinCosPositions,
    Tokens,
    check_choice,
    sincos_frequencies,
)


def shifted_positions(positions: Tensor, shifts: Tensor, frequencies: Tensor) -> Tensor:
    """Shift sine-cosine positions (…, dim) by (…, 2) rows and columns: ψ(x + δ) from ψ(x), bit-equal to it where δ is 0.

    It uses the sum formulas of sine and cosine, so that the coordinates themselves are not needed.
    """
    sine, cosine = positions.unflatten(-1, (2, 2, -1)).unbind(-2)  # (…, 2, dim / 4) each: columns, then rows
    angles = shifts.flip(-1)[..., None] * frequencies
    turned = sine * angles.cos() + cosine * angles.sin(), cosine * angles.cos() - sine * angles.sin()
    return torch.stack(turned, dim=-2).flatten(-3)


class JitteredPositions(Positions):
    """Sine-cosine positions of jittered coordinates, ψ(x + δ) with δ ~ N(0, scale²), in training only.

    The mean of the samples is not ψ: frequency ω is damped by exp(-ω² scale² / 2).

    Args:
        grid: rows and columns of patches.
        dim: width of the positions.
        scale: standard deviation of δ, in patches.
        apply_to: which tokens get noise: "masked", "context", "both" or "none".
    """

    noise_dim = 2
    _frequencies: Tensor

    def __init__(self, grid: Grid | int, dim: int, scale: float = 0.5, apply_to: ApplyTo = "masked") -> None:
        super().__init__()
        check_choice("apply_to", apply_to, get_args(ApplyTo))
        if not (math.isfinite(scale) and scale >= 0):
            raise InputError(f"scale is {scale}: give 0 or a positive number.")
        self.base, self.scale, self.apply_to = SinCosPositions(grid, dim), float(scale), apply_to
        self.grid, self.dim = self.base.grid, dim
        self.register_buffer("_frequencies", sincos_frequencies(dim).float(), persistent=False)

    def table(self) -> Tensor:
        return self.base.table()

    def forward(
        self, indices: Tensor, *, tokens: Tokens = "masked", context: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Return ψ(x + δ) of these patches in training, where noise applies to these tokens, and ψ(x) otherwise."""
        if noise is None:
            noise = self.draw_noise(indices, tokens=tokens)
        positions = self.base(indices)
        return positions if noise is None else shifted_positions(positions, noise * self.scale, self._frequencies)

    def sample(self, indices: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return noisy positions, in training and evaluation mode."""
        return self(indices, noise=self.standard_normal(indices, generator))

    def noise_power(self) -> Tensor:
        """Return E ‖ψ(x + δ) - ψ(x)‖², the same for every patch: the sum of 2 - 2 E cos(ω δ) over all frequencies."""
        if self.apply_to == "none":
            return super().noise_power()
        exponents = (self.scale * self._frequencies).square() / 2
        # Every frequency occurs twice, for rows and for columns.
        return -4 * torch.expm1(-exponents).sum()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}, apply_to={self.apply_to}"
