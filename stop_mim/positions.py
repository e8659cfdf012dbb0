"""Positions of patches as vectors: fixed (sine-cosine), learned, and stochastic (StoP, the paper's idea).

Everything here needs torch alone, so that it can be put into any masked-image model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]
Tokens = Literal["masked", "context"]
ApplyTo = Literal["masked", "context", "both", "none"]
Convention = Literal["paper", "release"]

PROJECTION_INIT_STD = 0.02


def sincos_positions(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Sine-cosine embedding of continuous patch coordinates: the first half of the features is the column's."""
    if dim <= 0 or dim % 4:
        raise ValueError(f"dim is {dim}: two-dimensional sine-cosine positions need a positive multiple of 4.")
    frequencies = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = [coordinate.to(torch.float64)[..., None] * frequencies for coordinate in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=-1).float()


def stochastic_positions(
    positions: Tensor,
    project: Callable[[Tensor], Tensor],
    noise_dim: int,
    noise_std: float | Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """ψ̂ = A n + ψ with n ~ N(0, noise_std² I): `project` multiplies by A, so gradients reach A through the noise."""
    noise = torch.randn(
        *positions.shape[:-1], noise_dim, device=positions.device, dtype=positions.dtype, generator=generator
    )
    return project(noise * noise_std) + positions


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
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor:
        """Positions of these patches; `tokens` says which tokens they are for, which only matters to noise."""
        return self.table()[indices]

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
        rows, columns = (
            (torch.arange(size) + 0.5) * old / size - 0.5 for size, old in zip(self.grid, covered, strict=True)
        )
        table = sincos_positions(rows[:, None].expand(self.grid), columns.expand(self.grid), self.dim)
        self.register_buffer("_table", table.flatten(0, 1), persistent=False)

    def table(self) -> Tensor:
        """The positions ψ of the whole grid."""
        return self._table

    def resized(self, grid: Grid | int) -> "SinCosPositions":
        """Sine and cosine at the new patches' centres, in the coordinates of the old grid."""
        other = SinCosPositions(grid, self.dim)
        other._set_table(self.grid)
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


class StochasticPositions(Positions):
    """StoP: positions drawn from N(ψ, Σ) with Σ = σ A Aᵀ, in training only.

    `projection` is the linear layer that carries the context's features into the predictor (or decoder); its weight is
    A, so silencing the noise would silence the context too. It stays the property of the model that it is part of.

    - `sigma`: a number, or a function of the training step that `set_step` evaluates.
    - `apply_to`: which tokens get noise: "masked" (the paper's choice), "context", "both" or "none".
    - `covariance`: "tied" (A of the projection), "identity" (Σ = σ I, nothing learned), "diagonal", "untied" (an A of
      its own) or "low_rank(r)" (an A of its own with r columns).
    - `convention`: what sigma and the masked token mean.
      "paper": sigma is the variance of n, and the masked token is A n + ψ + m̃, where the caller adds the learned m̃.
      "release": sigma is the standard deviation of n, and the masked token is A n + b + ψ with the projection's bias b,
      which is added here, and no m̃ (`adds_mask_token` is False).
    """

    noise_std: Tensor
    covariance: "Covariance"

    def __init__(
        self,
        base: Positions,
        projection: nn.Linear | None,
        sigma: float | Callable[[int], float] = 0.25,
        apply_to: ApplyTo = "masked",
        covariance: str = "tied",
        convention: Convention = "paper",
    ) -> None:
        super().__init__()
        _check_choice("apply_to", apply_to, ("masked", "context", "both", "none"))
        _check_choice("convention", convention, ("paper", "release"))
        if projection is not None and projection.out_features != base.dim:
            raise ValueError(
                f"projection gives {projection.out_features} features and the positions have {base.dim}: "
                "make the projection as wide as the positions."
            )
        self.grid, self.dim = base.grid, base.dim
        self.base = base
        # In a tuple, so that the layer is not registered here a second time.
        self._projection = (projection,)
        self.covariance = make_covariance(covariance, base.dim, projection)
        # An A of its own that never meets noise would wait for a gradient that cannot come.
        self.covariance.requires_grad_(apply_to != "none")
        self.apply_to, self.convention = apply_to, convention
        self.adds_mask_token = convention == "paper"
        self._sigma_at = sigma if callable(sigma) else None
        self.register_buffer("noise_std", torch.zeros(()), persistent=False)
        self.set_sigma(sigma(0) if callable(sigma) else sigma)

    def set_sigma(self, sigma: float) -> None:
        """Change sigma from here on."""
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"sigma is {sigma}: give a finite number that is zero or positive.")
        self.sigma = float(sigma)
        self._silent = self.sigma == 0
        # A tensor, so that a compiled model does not compile anew for every value of a schedule.
        self.noise_std.fill_(math.sqrt(sigma) if self.convention == "paper" else sigma)

    def set_step(self, step: int) -> None:
        """Move sigma to this training step, if it follows a schedule."""
        if self._sigma_at is not None:
            self.set_sigma(self._sigma_at(step))

    def table(self) -> Tensor:
        """The means ψ of the whole grid."""
        return self.base.table()

    def forward(
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor:
        """Positions for masked or context tokens: with noise where it applies, in training mode only."""
        if not (self.training and self._applies_to(tokens)):
            return self.mean(indices, tokens=tokens)
        if self._silent:
            return self._silent_sample(indices, tokens)
        return self.sample(indices, tokens=tokens, generator=generator)

    def mean(self, indices: Tensor, *, tokens: Tokens = "masked") -> Tensor:
        """The positions without noise."""
        positions = self.base(indices)
        bias = self._masked_bias(tokens)
        return positions if bias is None else positions + bias

    def sample(self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None) -> Tensor:
        """Noisy positions, in training and evaluation mode alike."""
        mean = self.mean(indices, tokens=tokens)
        return stochastic_positions(mean, self.covariance, self.covariance.noise_dim, self.noise_std, generator)

    def covariance_matrix(self) -> Tensor:
        """Σ, the covariance of a sampled position, (dim, dim)."""
        A = self.covariance.factor()
        return self.noise_std.square() * A @ A.T

    def resized(self, grid: Grid | int) -> "StochasticPositions":
        """The same noise around the positions of another grid."""
        other = StochasticPositions(
            self.base.resized(grid),
            self._projection[0],
            self._sigma_at or self.sigma,
            self.apply_to,
            self.covariance.name,
            self.convention,
        )
        other.covariance = self.covariance
        other.set_sigma(self.sigma)
        return other.to(self.table().device).train(self.training)

    def extra_repr(self) -> str:
        return (
            f"sigma={self.sigma:g}, apply_to={self.apply_to}, covariance={self.covariance.name}, "
            f"convention={self.convention}"
        )

    def _silent_sample(self, indices: Tensor, tokens: Tokens) -> Tensor:
        positions = self.mean(indices, tokens=tokens)
        for parameter in self.covariance.parameters():
            # The sum of nothing is +0, which changes no bit; with it the gradient of A is zero and not missing, as
            # DistributedDataParallel wants it of everything that learns.
            positions = positions - parameter.flatten()[:0].sum()
        return positions

    def _applies_to(self, tokens: Tokens) -> bool:
        _check_choice("tokens", tokens, ("masked", "context"))
        return self.apply_to in (tokens, "both")

    def _masked_bias(self, tokens: Tokens) -> Tensor | None:
        # The release sends the noise through the whole linear layer; where no noise goes, no bias goes either.
        if self.convention == "paper" or tokens == "context" or not self._applies_to(tokens):
            return None
        projection = self._projection[0]
        return None if projection is None else projection.bias


class Covariance(nn.Module, ABC):
    """The factor A of Σ = σ A Aᵀ: called with noise (…, noise_dim), gives A n (…, dim)."""

    name: str
    noise_dim: int

    @abstractmethod
    def factor(self) -> Tensor:
        """A as a matrix, (dim, noise_dim)."""


class TiedCovariance(Covariance):
    """A is the weight of the layer that projects the context."""

    name = "tied"

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self._projection = (projection,)
        self.noise_dim = projection.in_features

    def factor(self) -> Tensor:
        """The projection's weight."""
        return self._projection[0].weight

    def forward(self, noise: Tensor) -> Tensor:
        """A n."""
        return F.linear(noise, self.factor())


class IdentityCovariance(Covariance):
    """Σ = σ I: the fixed covariance of the paper's comparison."""

    name = "identity"
    _factor: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.noise_dim = dim
        self.register_buffer("_factor", torch.eye(dim), persistent=False)

    def factor(self) -> Tensor:
        """The identity."""
        return self._factor

    def forward(self, noise: Tensor) -> Tensor:
        """The noise itself."""
        return noise


class DiagonalCovariance(Covariance):
    """A learned scale for every feature, without correlations."""

    name = "diagonal"

    def __init__(self, dim: int, encoder_dim: int) -> None:
        super().__init__()
        self.noise_dim = dim
        # The total variance that a freshly initialised tied A would have.
        self.scale = nn.Parameter(torch.full((dim,), PROJECTION_INIT_STD * math.sqrt(encoder_dim)))

    def factor(self) -> Tensor:
        """The scales on a diagonal."""
        return torch.diag(self.scale)

    def forward(self, noise: Tensor) -> Tensor:
        """A n."""
        return noise * self.scale


class FreeCovariance(Covariance):
    """An A of its own, of any number of columns: nothing but the loss keeps it from vanishing."""

    def __init__(self, name: str, dim: int, encoder_dim: int, rank: int) -> None:
        super().__init__()
        self.name, self.noise_dim = name, rank
        self.weight = nn.Parameter(torch.empty(dim, rank))
        # The total variance that a freshly initialised tied A would have, at any rank.
        nn.init.trunc_normal_(self.weight, std=PROJECTION_INIT_STD)
        self.weight.data.mul_(math.sqrt(encoder_dim / rank))

    def factor(self) -> Tensor:
        """The weight."""
        return self.weight

    def forward(self, noise: Tensor) -> Tensor:
        """A n."""
        return F.linear(noise, self.weight)


def make_covariance(name: str, dim: int, projection: nn.Linear | None) -> Covariance:
    """The covariance of that name: tied, identity, diagonal, untied or low_rank(r)."""
    encoder_dim = projection.in_features if projection is not None else dim
    if name == "tied":
        if projection is None:
            raise ValueError("covariance is 'tied' and projection is None: hand over the layer that projects context.")
        return TiedCovariance(projection)
    if name == "identity":
        return IdentityCovariance(dim)
    if name == "diagonal":
        return DiagonalCovariance(dim, encoder_dim)
    if name == "untied":
        return FreeCovariance(name, dim, encoder_dim, rank=encoder_dim)
    rank = name.removeprefix("low_rank(").removesuffix(")")
    if name == f"low_rank({rank})" and rank.isdecimal() and 1 <= int(rank) <= dim:
        return FreeCovariance(name, dim, encoder_dim, rank=int(rank))
    raise ValueError(
        f"covariance is '{name}': choose tied, identity, diagonal, untied or low_rank(r) with r from 1 to {dim}."
    )


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


def _check_choice(thing: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{thing} is '{value}': choose one of {', '.join(choices)}.")
