"""The interface of positions, and the two kinds without noise: sine-cosine and learned tables over a grid of patches."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from stop_mim.errors import InputError

Grid = tuple[int, int]
Tokens = Literal["masked", "context"]

PROJECTION_INIT_STD = 0.02


def sincos_frequencies(dim: int) -> Tensor:
    """Return the dim / 4 frequencies of the sine-cosine pairs of one coordinate, in radians a patch."""
    if dim <= 0 or dim % 4:
        raise InputError(f"dim is {dim}: two-dimensional sine-cosine positions need a positive multiple of 4.")
    return 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))


class Positions(nn.Module, ABC):
    """Maps patch indices (B, n), row-major over the grid, to position vectors (B, n, dim).

    Noisy positions draw their noise themselves, in training mode, from torch's default generator; or it is drawn
    beforehand with `draw_noise` and passed to the call.
    """

    grid: Grid
    dim: int
    adds_mask_token: bool = True
    """Whether masked tokens also carry the learned vector m̃ that marks them as masked."""

    @abstractmethod
    def table(self) -> Tensor:
        """Return the positions ψ of the whole grid without noise, (rows · columns, dim)."""

    def forward(self, indices: Tensor, *, tokens: Tokens = "masked", noise: Tensor | None = None) -> Tensor:
        """Return the positions of these patches.

        Args:
            indices: patch indices, (B, n).
            tokens: which tokens the positions are for; noise may apply to one kind only.
            noise: the result of `draw_noise` for these indices and tokens.
        """
        return self.table()[indices]

    def draw_noise(
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Draw standard normal noise for these tokens; None if they get none, as in evaluation."""
        return None

    def noise_power(self) -> Tensor:
        """Return E ‖ψ̂ - ψ‖² of the tokens that get noise in training, averaged over patches; 0 without noise."""
        return self.table().new_zeros(())

    def extra_repr(self) -> str:
        return f"grid={self.grid[0]}x{self.grid[1]}, dim={self.dim}"


class SinCosPositions(Positions):
    """Fixed two-dimensional sine-cosine positions; the first half of the features is the column's."""

    _table: Tensor

    def __init__(self, grid: Grid | int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = as_grid(grid), dim
        rows, columns = torch.cartesian_prod(*(torch.arange(size) for size in self.grid)).unbind(1)
        angles = [coordinate[:, None] * sincos_frequencies(dim) for coordinate in (columns, rows)]
        table = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()
        self.register_buffer("_table", table, persistent=False)

    def table(self) -> Tensor:
        return self._table


class LearnedPositions(Positions):
    """One learned vector a patch."""

    def __init__(self, grid: Grid | int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = as_grid(grid), dim
        self.weight = nn.Parameter(torch.empty(self.grid[0] * self.grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=PROJECTION_INIT_STD)

    def table(self) -> Tensor:
        return self.weight


def as_grid(grid: Grid | int) -> Grid:
    """Return (rows, columns); a single number is a square grid."""
    rows, columns = (grid, grid) if isinstance(grid, int) else grid
    if rows < 1 or columns < 1:
        raise InputError(f"grid is {rows}x{columns}: it needs at least one row and one column.")
    return rows, columns
