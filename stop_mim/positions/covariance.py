"""Covariance forms: the factor A of Σ = σ A Aᵀ, tied to the context's projection or learned on its own.

A new form is one class with one decorator, in any module: `@COVARIANCES.register("name") class Mine(Covariance)`.
"""

import math
import re
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.positions.deterministic import PROJECTION_INIT_STD
from stop_mim.registry import Registry


class Covariance(nn.Module, ABC):
    """The factor A of Σ = σ A Aᵀ: maps standard normal noise (…, noise_dim) to A n (…, dim).

    A subclass takes `(dim, projection)`, where `projection` is the layer that projects the context, or None. A subclass
    with a `parameter` takes that whole number as a third argument: its users write "name(number)".
    """

    parameter: ClassVar[str | None] = None
    noise_dim: int

    @abstractmethod
    def factor(self) -> Tensor:
        """Return A as a matrix, (dim, noise_dim)."""

    def forward(self, noise: Tensor) -> Tensor:
        """Return A n."""
        return F.linear(noise, self.factor())


COVARIANCES: Registry[type[Covariance]] = Registry("covariance", __name__)


def make_covariance(name: str, dim: int, projection: nn.Linear | None) -> Covariance:
    """Return the covariance of that name, such as "tied" or "low_rank(8)"."""
    found = re.fullmatch(r"(\w+)\((\d{1,9})\)", name)
    form = COVARIANCES.find(found[1] if found else name)
    if (found is None) != (form.parameter is None):
        given = name.partition("(")[0] + (f"({form.parameter})" if form.parameter else "")
        raise InputError(f"covariance is '{name}': write {given}.")
    return form(dim, projection) if found is None else form(dim, projection, int(found[2]))


@COVARIANCES.register("tied")
class TiedCovariance(Covariance):
    """The paper's form: A is the weight of the layer that projects the context."""

    def __init__(self, dim: int, projection: nn.Linear | None) -> None:
        super().__init__()
        if projection is None:
            raise InputError("covariance is 'tied' and projection is None: pass the layer that projects the context.")
        # In a tuple, so that the layer is not registered a second time.
        self._projection = (projection,)
        self.noise_dim = projection.in_features

    def factor(self) -> Tensor:
        return self._projection[0].weight


@COVARIANCES.register("identity")
class IdentityCovariance(Covariance):
    """Σ = σ I: the paper's comparison with a fixed covariance."""

    _factor: Tensor

    def __init__(self, dim: int, projection: nn.Linear | None) -> None:
        super().__init__()
        self.noise_dim = dim
        self.register_buffer("_factor", torch.eye(dim), persistent=False)

    def factor(self) -> Tensor:
        return self._factor

    def forward(self, noise: Tensor) -> Tensor:
        return noise


@COVARIANCES.register("diagonal")
class DiagonalCovariance(Covariance):
    """A learned scale for each feature, without correlations."""

    def __init__(self, dim: int, projection: nn.Linear | None) -> None:
        super().__init__()
        self.noise_dim = dim
        # The same total variance as a freshly initialised tied A.
        self.scale = nn.Parameter(torch.full((dim,), PROJECTION_INIT_STD * math.sqrt(_encoder_dim(dim, projection))))

    def factor(self) -> Tensor:
        return torch.diag(self.scale)

    def forward(self, noise: Tensor) -> Tensor:
        return noise * self.scale


@COVARIANCES.register("untied")
class UntiedCovariance(Covariance):
    """A learned A that is not shared with the projection: only the loss keeps it from vanishing."""

    def __init__(self, dim: int, projection: nn.Linear | None, rank: int | None = None) -> None:
        super().__init__()
        encoder_dim = _encoder_dim(dim, projection)
        self.noise_dim = encoder_dim if rank is None else rank
        self.weight = nn.Parameter(torch.empty(dim, self.noise_dim))
        nn.init.trunc_normal_(self.weight, std=PROJECTION_INIT_STD)
        # The same total variance as a freshly initialised tied A, at any rank.
        self.weight.data.mul_(math.sqrt(encoder_dim / self.noise_dim))

    def factor(self) -> Tensor:
        return self.weight


@COVARIANCES.register("low_rank")
class LowRankCovariance(UntiedCovariance):
    """An untied A with r columns."""

    parameter = "r"

    def __init__(self, dim: int, projection: nn.Linear | None, rank: int) -> None:
        if not 1 <= rank <= dim:
            raise InputError(f"covariance is 'low_rank({rank})': choose r from 1 to {dim}, the width of the positions.")
        super().__init__(dim, projection, rank)


def _encoder_dim(dim: int, projection: nn.Linear | None) -> int:
    return dim if projection is None else projection.in_features
