"""The interface of positions, and the two kinds without noise: sine-cosine and learned tables over a grid of patches."""

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.options import ApplyTo

Grid = tuple[int, int]
Tokens = Literal["masked", "context"]

PROJECTION_INIT_STD = 0.02


def sincos_positions(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Return sine-cosine embeddings of continuous patch coordinates; the first half of the features is the column's."""
    frequencies = sincos_frequencies(dim).to(rows.device)
    angles = [coordinate.to(torch.float64)[..., None] * frequencies for coordinate in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=-1).float()


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
    apply_to: ApplyTo = "none"
    """Which tokens get noise in training."""
    noise_dim: int = 0
    """Number of standard normal values in the noise of a token."""
    adds_mask_token: bool = True
    """Whether masked tokens also carry the learned vector m̃ that marks them as masked."""

    @abstractmethod
    def table(self) -> Tensor:
        """Return the positions ψ of the whole grid without noise, (rows · columns, dim)."""

    def forward(
        self, indices: Tensor, *, tokens: Tokens = "masked", context: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Return the positions of these patches.

        Args:
            indices: patch indices, (B, n).
            tokens: which tokens the positions are for; noise may apply to one kind only.
            context: encoder features of each image, (images, n, features), for noise that depends on them. Each image may
                have several consecutive rows of indices.
            noise: the result of `draw_noise` for these indices and tokens.
        """
        return self.table()[indices]

    def draw_noise(
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Draw standard normal noise, (B, n, noise_dim), for these tokens; None if they get none, as in evaluation."""
        applies = self.applies_to(tokens)
        return self.standard_normal(indices, generator) if applies and self.training else None

    def standard_normal(self, indices: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normal noise, (B, n, noise_dim), in any mode."""
        table = self.table()
        shape = (*indices.shape, self.noise_dim)
        return torch.randn(shape, device=table.device, dtype=table.dtype, generator=generator)

    def applies_to(self, tokens: Tokens) -> bool:
        """Return whether these tokens get noise in training."""
        check_choice("tokens", tokens, get_args(Tokens))
        return self.apply_to in (tokens, "both")

    def noise_power(self) -> Tensor:
        """Return E ‖ψ̂ - ψ‖² of the tokens that get noise in training, averaged over patches and images."""
        return self.table().new_zeros(())

    def set_step(self, step: int) -> None:
        """Move values that follow a schedule to this training step."""

    def extra_repr(self) -> str:
        return f"grid={self.grid[0]}x{self.grid[1]}, dim={self.dim}"


class SinCosPositions(Positions):
    """Fixed two-dimensional sine-cosine positions."""

    _table: Tensor

    def __init__(self, grid: Grid | int, dim: int) -> None:
        super().__init__()
        self.grid, self.dim = as_grid(grid), dim
        rows, columns = (torch.arange(size, dtype=torch.float32) for size in self.grid)
        table = sincos_positions(rows[:, None].expand(self.grid), columns.expand(self.grid), dim)
        self.register_buffer("_table", table.flatten(0, 1), persistent=False)

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


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise InputError unless the value is one of the choices."""
    if value not in choices:
        raise InputError(f"{name} is '{value}': choose one of {', '.join(choices)}.")
