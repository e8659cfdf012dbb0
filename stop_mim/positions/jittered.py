"""Noise in coordinate space: row and column of a patch are jittered before sine and cosine. Ours, not the paper's."""

import math

import torch
from torch import Tensor, nn

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
        learned: learn one scale each for rows and columns, starting from `scale`. Nothing keeps it from vanishing.
        apply_to: which tokens get noise: "masked", "context", "both" or "none".
    """

    log_scale: nn.Parameter | None
    """Logarithms of the scales of rows and columns, if they are learned."""
    _fixed_scale: Tensor
    _frequencies: Tensor

    def __init__(
        self, grid: Grid | int, dim: int, scale: float = 0.5, learned: bool = False, apply_to: ApplyTo = "masked"
    ) -> None:
        super().__init__()
        check_choice("apply_to", apply_to, ("masked", "context", "both", "none"))
        if not (math.isfinite(scale) and scale >= 0):
            raise InputError(f"scale is {scale}: give 0 or a positive number.")
        if learned and scale == 0:
            raise InputError("scale is 0 and learned: give a learned scale a start above 0.")
        self.base = SinCosPositions(grid, dim)
        self.grid, self.dim = self.base.grid, dim
        self.learned, self.apply_to, self._start = learned, apply_to, float(scale)
        self.register_buffer("_frequencies", sincos_frequencies(dim).float(), persistent=False)
        self.register_buffer("_fixed_scale", torch.full((2,), self._start), persistent=False)
        self.log_scale = None
        if learned:
            # Without noise there is no gradient, and DistributedDataParallel would wait for it.
            self.log_scale = nn.Parameter(self._fixed_scale.log(), requires_grad=apply_to != "none")

    def scale(self) -> Tensor:
        """Return the current standard deviations of rows and columns, (2,)."""
        return self._fixed_scale if self.log_scale is None else self.log_scale.exp()

    def table(self) -> Tensor:
        """Return the positions ψ of the whole grid without noise."""
        return self.base.table()

    def forward(
        self, indices: Tensor, *, tokens: Tokens = "masked", context: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the positions of these patches: with noise where it applies, in training mode only."""
        if noise is None:
            noise = self.draw_noise(indices, tokens=tokens)
        positions = self.base(indices)
        return positions if noise is None else shifted_positions(positions, noise * self.scale(), self._frequencies)

    def draw_noise(
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Draw δ in units of the scale, (B, n, 2); None if these tokens get no noise."""
        check_choice("tokens", tokens, ("masked", "context"))
        if not self.training or self.apply_to not in (tokens, "both") or self._start == 0:
            return None
        return self._standard_normal(indices, generator)

    def sample(self, indices: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return noisy positions, in training and evaluation mode."""
        return self(indices, noise=self._standard_normal(indices, generator))

    def noise_power(self) -> Tensor:
        """Return E ‖ψ(x + δ) - ψ(x)‖², the same for every patch: the sum of 2 - 2 E cos(ω δ) over all frequencies."""
        if self.apply_to == "none":
            return super().noise_power()
        exponents = (self.scale()[:, None] * self._frequencies).square() / 2
        return -2 * torch.expm1(-exponents).sum()

    def extra_repr(self) -> str:
        rows, columns = self.scale().tolist()
        return f"scale={rows:g}x{columns:g}, learned={self.learned}, apply_to={self.apply_to}"

    def _standard_normal(self, indices: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.randn(*indices.shape, 2, device=self.table().device, generator=generator)
