"""StoP, the paper's method: positions of masked tokens are drawn from a normal distribution around fixed ones."""

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from stop_mim.errors import InputError, check_choice
from stop_mim.options import ApplyTo, Convention
from stop_mim.positions.covariance import make_covariance
from stop_mim.positions.deterministic import Positions, Tokens


def stochastic_positions(
    positions: Tensor, noise: Tensor, noise_std: float, project: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ψ̂ = A n + ψ with n = noise_std · noise; `project` applies A, so that A receives gradients."""
    return project(noise * noise_std) + positions


class StochasticPositions(Positions):
    """StoP: positions ψ̂ ~ N(ψ, Σ) with Σ = σ A Aᵀ, in training only; in evaluation they are ψ.

    A sample is ψ̂ = A n + ψ with n ~ N(0, σ I). A is the weight of `projection`, the layer that projects the context
    into the predictor. A smaller A would mean less noise, but also less of the context: this keeps A from collapsing.

    Args:
        base: the means ψ.
        projection: linear layer from encoder to predictor. It is not registered here: the model owns it.
        sigma: σ, the strength of the noise.
        apply_to: which tokens get noise: "masked" (the paper), "context", "both" or "none".
        covariance: "tied" (A is the projection's weight), "identity", "diagonal", "untied", "low_rank(r)" or the name of
            a registered `Covariance`.
        convention: "paper": σ is the variance of n, and a masked token is A n + ψ + m̃; the caller adds m̃.
            "std": σ is the standard deviation of n, and the masked token is the same.
            "release": σ is the standard deviation of n, and a masked token is A n + b + ψ with the projection's bias b,
            which is added here (in evaluation, too), and without m̃ (`adds_mask_token` is False). Masked tokens that get no
            noise because of `apply_to` are ψ.
    """

    def __init__(
        self,
        base: Positions,
        projection: nn.Linear | None,
        sigma: float = 0.25,
        apply_to: ApplyTo = "masked",
        covariance: str = "tied",
        convention: Convention = "paper",
    ) -> None:
        super().__init__()
        check_choice("apply_to", apply_to, get_args(ApplyTo))
        check_choice("convention", convention, get_args(Convention))
        if not (math.isfinite(sigma) and sigma >= 0):
            raise InputError(f"sigma is {sigma}: give 0 or a positive number.")
        if projection is not None and projection.out_features != base.dim:
            raise InputError(
                f"projection has {projection.out_features} output features and the positions {base.dim}: make them equal."
            )
        self.grid, self.dim, self.base = base.grid, base.dim, base
        self.apply_to, self.convention, self.sigma = apply_to, convention, sigma
        self.noise_std = math.sqrt(sigma) if convention == "paper" else sigma
        self.adds_mask_token = convention != "release"
        # In a tuple, so that the layer is not registered a second time.
        self._projection = (projection,)
        self.covariance_name, self.covariance = covariance, make_covariance(covariance, base.dim, projection)
        if apply_to == "none":
            # Without noise there is no gradient, and DistributedDataParallel would wait for it.
            self.covariance.requires_grad_(False)

    @property
    def projection(self) -> nn.Linear | None:
        """The layer with weight A."""
        return self._projection[0]

    def table(self) -> Tensor:
        return self.base.table()

    def forward(self, indices: Tensor, *, tokens: Tokens = "masked", noise: Tensor | None = None) -> Tensor:
        """Return ψ̂ of these patches in training, if noise applies to these tokens, else ψ; given noise is always applied."""
        mean = self.mean(indices, tokens=tokens)
        if noise is None:
            noise = self.draw_noise(indices, tokens=tokens)
        if noise is None:
            return mean
        return stochastic_positions(mean, noise, self.noise_std, self.covariance)

    def mean(self, indices: Tensor, *, tokens: Tokens = "masked") -> Tensor:
        """Return the positions without noise."""
        positions = self.base(indices)
        # The release passes the noise through the whole linear layer: tokens without noise get no bias either.
        adds_bias = self.convention == "release" and tokens == "masked" and self.applies_to(tokens)
        bias = getattr(self.projection, "bias", None) if adds_bias else None
        return positions if bias is None else positions + bias

    def applies_to(self, tokens: Tokens) -> bool:
        check_choice("tokens", tokens, get_args(Tokens))
        return self.apply_to in (tokens, "both")

    def draw_noise(
        self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Draw standard normal noise, (B, n, noise_dim), for these tokens; None if they get none, as in evaluation."""
        if not (self.applies_to(tokens) and self.training):
            return None
        return self._standard_normal(indices, generator)

    def _standard_normal(self, indices: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw standard normal noise, (B, n, noise_dim), in any mode."""
        table = self.table()
        shape = (*indices.shape, self.covariance.noise_dim)
        return torch.randn(shape, device=table.device, dtype=table.dtype, generator=generator)

    def sample(self, indices: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return ψ̂ = A n + ψ of these patches, in training and evaluation mode and under any convention."""
        noise = self._standard_normal(indices, generator)
        return stochastic_positions(self.base(indices), noise, self.noise_std, self.covariance)

    def covariance_matrix(self) -> Tensor:
        """Return Σ, (dim, dim)."""
        A = self.covariance.factor()
        return self.noise_std**2 * A @ A.T

    def noise_power(self) -> Tensor:
        """Return the trace of Σ, or 0 if no tokens get noise."""
        power = self.noise_std**2 * self.covariance.factor().square().sum()
        return torch.zeros_like(power) if self.apply_to == "none" else power

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, sigma={self.sigma:g}, apply_to={self.apply_to}, "
            f"covariance={self.covariance_name}, convention={self.convention}"
        )
