"""StoP, the paper's idea: positions of masked tokens are drawn from a normal distribution around the fixed ones."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from stop_mim.positions.covariance import Covariance, make_covariance
from stop_mim.positions.deterministic import ApplyTo, Grid, Positions, Tokens, check_choice
from stop_mim.positions.noise_scale import NoiseScale

Convention = Literal["paper", "release"]


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
    - `noise_scale`: how much noise each image gets, as its context has it (ours, not the paper's); not given: all the
      same. With it, training needs `positions(indices, context=features)`.
    """

    noise_std: Tensor
    covariance: Covariance

    def __init__(
        self,
        base: Positions,
        projection: nn.Linear | None,
        sigma: float | Callable[[int], float] = 0.25,
        apply_to: ApplyTo = "masked",
        covariance: str = "tied",
        convention: Convention = "paper",
        noise_scale: NoiseScale | None = None,
    ) -> None:
        super().__init__()
        check_choice("apply_to", apply_to, ("masked", "context", "both", "none"))
        check_choice("convention", convention, ("paper", "release"))
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
        self.noise_scale = noise_scale
        # What is learned about noise that goes nowhere would wait for a gradient that cannot come.
        for learned in self._noise_parameters():
            learned.requires_grad_(apply_to != "none")
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
        self,
        indices: Tensor,
        *,
        tokens: Tokens = "masked",
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Positions for masked or context tokens: with noise where it applies, in training mode only."""
        if not (self.training and self._applies_to(tokens)):
            return self.mean(indices, tokens=tokens)
        if self.noise_scale is not None and context is None:
            raise ValueError(
                "context is None and the noise depends on the context: call positions(indices, context=features)."
            )
        if self._silent:
            return self._silent_sample(indices, tokens)
        return self.sample(indices, tokens=tokens, context=context, generator=generator)

    def mean(self, indices: Tensor, *, tokens: Tokens = "masked") -> Tensor:
        """The positions without noise."""
        positions = self.base(indices)
        bias = self._masked_bias(tokens)
        return positions if bias is None else positions + bias

    def sample(
        self,
        indices: Tensor,
        *,
        tokens: Tokens = "masked",
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Noisy positions, in training and evaluation mode alike; without a context as much as images have on average."""
        mean = self.mean(indices, tokens=tokens)
        noise_std = self._noise_std_of(indices, context)
        return stochastic_positions(mean, self.covariance, self.covariance.noise_dim, noise_std, generator)

    def covariance_matrix(self) -> Tensor:
        """Σ, the covariance of a sampled position, (dim, dim); of noise that depends on the context the mean over images."""
        A = self.covariance.factor()
        return self.noise_std.square() * A @ A.T

    def noise_power(self) -> Tensor:
        """The trace of Σ, where any tokens get noise."""
        power = self.noise_std.square() * self.covariance.factor().square().sum()
        return torch.zeros_like(power) if self.apply_to == "none" else power

    def resized(self, grid: Grid | int) -> "StochasticPositions":
        """The same noise around the positions of another grid."""
        other = StochasticPositions(
            self.base.resized(grid),
            self._projection[0],
            self._sigma_at or self.sigma,
            self.apply_to,
            self.covariance.name,
            self.convention,
            self.noise_scale,
        )
        other.covariance = self.covariance
        other.set_sigma(self.sigma)
        return other.to(self.table().device).train(self.training)

    def extra_repr(self) -> str:
        return (
            f"sigma={self.sigma:g}, apply_to={self.apply_to}, covariance={self.covariance.name}, "
            f"convention={self.convention}"
        )

    def _noise_parameters(self) -> list[nn.Parameter]:
        scaling = [] if self.noise_scale is None else self.noise_scale.parameters()
        return [*self.covariance.parameters(), *scaling]

    def _noise_std_of(self, indices: Tensor, context: Tensor | None) -> Tensor:
        if self.noise_scale is None or context is None:
            return self.noise_std
        rows, images = len(indices), len(context)
        if rows % images:
            raise ValueError(
                f"indices have {rows} rows and the context {images} images: give every image the same number of rows."
            )
        scale = self.noise_scale(context).repeat_interleave(rows // images)
        return self.noise_std * scale.to(self.noise_std)[:, None, None]

    def _silent_sample(self, indices: Tensor, tokens: Tokens) -> Tensor:
        positions = self.mean(indices, tokens=tokens)
        for parameter in self._noise_parameters():
            # The sum of nothing is +0, which changes no bit; with it the gradient is zero and not missing, as
            # DistributedDataParallel wants it of everything that learns.
            positions = positions - parameter.flatten()[:0].sum()
        return positions

    def _applies_to(self, tokens: Tokens) -> bool:
        check_choice("tokens", tokens, ("masked", "context"))
        return self.apply_to in (tokens, "both")

    def _masked_bias(self, tokens: Tokens) -> Tensor | None:
        # The release sends the noise through the whole linear layer; where no noise goes, no bias goes either.
        if self.convention == "paper" or tokens == "context" or not self._applies_to(tokens):
            return None
        projection = self._projection[0]
        return None if projection is None else projection.bias
