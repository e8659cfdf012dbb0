"""What positions are, and the two kinds without noise: sine-cosine and learned tables over a grid of patches."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]
Tokens = Literal["masked", "context"]
ApplyTo = Literal["masked", "context", "both", "none"]

PROJECTION_INIT_STD = 0.02


def sincos_positions(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Sine-cosine embedding of continuous patch coordinates: the first half of the features is the column's."""
    frequencies = sincos_frequencies(dim).to(rows.device)
    angles = [coordinate.to(torch.float64)[..., None] * frequencies for coordinate in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=-1).float()


def sincos_frequencies(dim: int) -> Tensor:
    """The dim / 4 angles by which one patch turns the pairs of sine and cosine of a coordinate."""
    if dim <= 0 or dim % 4:
        raise ValueError(f"dim is {dim}: two-dimensional sine-cosine positions need a positive multiple of 4.")
    return 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))


class Positions(nn.Module, ABC):
    """Maps patch indices (B, n), row-major over the grid, to position vectors (B, n, dim)."""

    grid: Grid
    dim: int
    adds_mask_token: bool = True
    """Whether a masked token also carries the learned vector m̃ that marks it as masked."""

    @abstractmethod
    def table(self) -> Tensor:
        """The (deterministic) positions ψ of the whole grid, (rows · columns, dim)."""

    @abstractmethod
    def resized(self, grid: Grid | int) -> "Positions":
        """The same positions on another grid that covers the same image."""

    def forward(
        self,
        indices: Tensor,
        *,
        tokens: Tokens = "masked",
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Positions of these patches; the rest only matters to noise.

        `tokens` says which tokens they are for. `context` are the encoder's features of each image, (images, n, features),
        for noise that depends on them; every image may have several rows of indices, one after the other.
        """
        return self.table()[indices]

    def noise_power(self) -> Tensor:
        """E ‖ψ̂ - ψ‖² of the tokens that get noise in training, on average over patches and images."""
        return self.table().new_zeros(())

    def set_step(self, step: int) -> None:
        """Move whatever follows a schedule to this training step."""

    def extra_repr(self) -> str:
        return f"grid={self.grid[0]}x{self.grid[1]}, dim={self.dim}"


class SinCosPositions(Positions):
    """Fixed two-dimensional sine-cosine positions."""

    _table: Tensor

    def __init__(self, grid: Grid | int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = as_grid(grid), dim
        self._set_table(self.grid)

    def _set_table(self, covered: Grid) -> None:
        self._covered = covered
        rows, columns = (
            (torch.arange(size) + 0.5) * old / size - 0.5 for size, old in zip(self.grid, covered, strict=True)
        )
        table = sincos_positions(rows[:, None].expand(self.grid), columns.expand(self.grid), self.dim)
        self.register_buffer("_table", table.flatten(0, 1), persistent=False)

    def table(self) -> Tensor:
        """The positions ψ of the whole grid."""
        return self._table

    def resized(self, grid: Grid | int) -> "SinCosPositions":
        """Sine and cosine at the new patches' centres, in the coordinates of the grid that these were made for."""
        other = SinCosPositions(grid, self.dim)
        other._set_table(self._covered)
        return other.to(self.table().device)


class LearnedPositions(Positions):
    """One free vector a patch."""

    def __init__(self, grid: Grid | int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = as_grid(grid), dim
        self.weight = nn.Parameter(torch.empty(self.grid[0] * self.grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=PROJECTION_INIT_STD)

    def table(self) -> Tensor:
        """The positions ψ of the whole grid."""
        return self.weight

    def resized(self, grid: Grid | int) -> "LearnedPositions":
        """The learned table, interpolated bicubically."""
        other = LearnedPositions(grid, self.dim).to(self.weight)
        other.weight.data.copy_(interpolate_table(self.weight.detach(), self.grid, other.grid))
        return other


def interpolate_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A table of position vectors on one grid, resampled bicubically to another."""
    image = table.unflatten(0, old).permute(2, 0, 1)[None].float()
    resized = F.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


def as_grid(grid: Grid | int) -> Grid:
    """(rows, columns) of a grid; a single number is a square."""
    rows, columns = (grid, grid) if isinstance(grid, int) else grid
    if rows < 1 or columns < 1:
        raise ValueError(f"grid is {rows}x{columns}: it needs at least one row and one column.")
    return rows, columns


def check_choice(thing: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{thing} is '{value}': choose one of {', '.join(choices)}.")
