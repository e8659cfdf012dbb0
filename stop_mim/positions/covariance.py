"""The shape of the noise: the factor A of Σ = σ A Aᵀ, tied to the context's projection or of its own."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stop_mim.positions.deterministic import PROJECTION_INIT_STD


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
