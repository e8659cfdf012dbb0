"""Noise in coordinate space: a patch's row and column are jittered before sine and cosine. Ours, not the paper's."""

import math

import torch
from torch import Tensor, nn

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
    """Sine-cosine positions (…, dim) moved by (…, 2) rows and columns: ψ(x + δ) from ψ(x), bit-equal to it where δ is 0.

    Sine and cosine of a sum are those of its parts, turned; the coordinates themselves are not needed.
    """
    sine, cosine = positions.unflatten(-1, (2, 2, -1)).unbind(-2)  # (…, 2, dim / 4) each: columns, then rows
    angles = shifts.flip(-1)[..., None] * frequencies
    turned = sine * angles.cos() + cosine * angles.sin(), cosine * angles.cos() - sine * angles.sin()
    return torch.stack(turned, dim=-2).flatten(-3)


class JitteredPositions(Positions):
    """Sine-cosine positions of coordinates with normal noise, ψ(x + δ) with δ ~ N(0, scale²), in training only.

    - `scale`: the standard deviation of δ, in patches of the grid that the positions were made for.
    - `learned`: whether rows and columns have a scale each that is learned from this start. Nothing ties it: the model may
      silence the noise without losing anything else, and whether it does is what there is to see.
    - `apply_to`: which tokens get noise: "masked", "context", "both" or "none".

    The samples' mean is not ψ: frequency ω is damped by exp(-ω² scale² / 2).
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
            raise ValueError(f"scale is {scale}: give a finite number that is zero or positive.")
        if learned and scale == 0:
            raise ValueError("scale is 0 and learned: start a learned scale above zero.")
        self.base = SinCosPositions(grid, dim)
        self.grid, self.dim = self.base.grid, dim
        self.learned, self.apply_to, self._start = learned, apply_to, float(scale)
        self.register_buffer("_frequencies", sincos_frequencies(dim).float(), persistent=False)
        self.register_buffer("_fixed_scale", torch.full((2,), self._start), persistent=False)
        self.log_scale = None
        if learned:
            # A scale of noise that goes nowhere would wait for a gradient that cannot come.
            self.log_scale = nn.Parameter(self._fixed_scale.log(), requires_grad=apply_to != "none")

    def scale(self) -> Tensor:
        """The standard deviations of rows and columns as they are now, (2,)."""
        return self._fixed_scale if self.log_scale is None else self.log_scale.exp()

    def table(self) -> Tensor:
        """The positions ψ of the whole grid, without noise."""
        return self.base.table()

    def forward(
        self,
        indices: Tensor,
        *,
        tokens: Tokens = "masked",
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Positions for masked or context tokens: with noise where it applies, in training mode only."""
        check_choice("tokens", tokens, ("masked", "context"))
        applies = self.apply_to in (tokens, "both")
        if not (self.training and applies) or self._start == 0:
            return self.base(indices)
        return self.sample(indices, generator=generator)

    def sample(self, indices: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Noisy positions, in training and evaluation mode alike."""
        positions = self.base(indices)
        noise = torch.randn(*indices.shape, 2, device=positions.device, dtype=positions.dtype, generator=generator)
        return shifted_positions(positions, noise * self.scale(), self._frequencies)

    def noise_power(self) -> Tensor:
        """E ‖ψ(x + δ) - ψ(x)‖², the same for every patch: the sum of 2 - 2 E cos(ω δ) over both axes' frequencies."""
        if self.apply_to == "none":
            return super().noise_power()
        exponents = (self.scale()[:, None] * self._frequencies).square() / 2
        return -2 * torch.expm1(-exponents).sum()

    def resized(self, grid: Grid | int) -> "JitteredPositions":
        """The same jitter, as a part of the image, around the positions of another grid; a learned scale is shared."""
        other = JitteredPositions(grid, self.dim, self._start, self.learned, self.apply_to)
        other.base, other.log_scale = self.base.resized(grid), self.log_scale
        return other.to(self.table().device).train(self.training)

    def extra_repr(self) -> str:
        rows, columns = self.scale().tolist()
        return f"scale={rows:g}x{columns:g}, learned={self.learned}, apply_to={self.apply_to}"
