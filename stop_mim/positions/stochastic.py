"""StoP, the paper's method: positions of masked tokens are drawn from a normal distribution around fixed ones."""

import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.options import ApplyTo, Convention
from stop_mim.positions.covariance import make_covariance
from stop_mim.positions.deterministic import Positions, Tokens, check_choice


def stochastic_positions(
    positions: Tensor, noise: Tensor, noise_std: float | Tensor, project: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ψ̂ = A n + ψ with n = noise_std · noise; `project` multiplies by A, so that gradients reach A."""
    return project(noise * noise_std) + positions


class NoiseScale(nn.Module):
    """s(x) of ψ̂ = ψ + s(x) A n: one positive number an image, from a linear head on the mean of its context features.

    It is ours: the paper leaves noise that depends on the image to future work.

    The head compares the images of a batch: u = most^tanh(head - mean head) lies between 1/most and most, and s is u
    divided by its root mean square. The noise of a batch thus keeps its power, whatever the head learns, and no image gets
    less than 1/most² of its amplitude: the head can redistribute the noise but not silence it. It starts at s = 1.

    The batch is the part of it on one device; a single image has s = 1. No gradient reaches the features, so that the
    encoder does not learn to ask for less noise.
    """

    def __init__(self, context_dim: int, most: float = 2.0) -> None:
        super().__init__()
        if not (math.isfinite(most) and most >= 1):
            raise InputError(f"most is {most}: give a number of at least 1.")
        self.most = float(most)
        # A parameter and not a layer: it draws no random numbers and stays zero when a model's layers are initialised.
        self.weight = nn.Parameter(torch.zeros(1, context_dim))

    def forward(self, context: Tensor) -> Tensor:
        """Return s of every image, (images,), from its context features, (images, n, context_dim)."""
        if context.ndim != 3 or context.shape[-1] != self.weight.shape[1]:
            raise InputError(
                f"context has the shape {tuple(context.shape)}: give (images, tokens, {self.weight.shape[1]} features)."
            )
        scores = F.linear(context.detach().mean(dim=1), self.weight).float().squeeze(-1)
        # Relative to the mean: a common offset would saturate tanh, and the head would stop learning.
        scales = torch.exp(math.log(self.most) * torch.tanh(scores - scores.mean()))
        return scales / scales.square().mean().sqrt()

    def of_rows(self, context: Tensor | None, rows: int) -> Tensor:
        """Return s of the image of every row of indices, (rows, 1, 1); each image has the same number of consecutive rows."""
        if context is None:
            raise InputError(
                "context is None and the noise depends on the context: call positions(indices, context=features)."
            )
        if rows % len(context):
            raise InputError(
                f"indices have {rows} rows and the context {len(context)} images: give every image the same number of rows."
            )
        return self(context).repeat_interleave(rows // len(context))[:, None, None]

    def extra_repr(self) -> str:
        return f"context_dim={self.weight.shape[1]}, most={self.most:g}"


class StochasticPositions(Positions):
    """StoP: positions ψ̂ ~ N(ψ, Σ) with Σ = σ A Aᵀ, in training only; in evaluation they are ψ.

    A sample is ψ̂ = A n + ψ with n ~ N(0, σ I). A is the weight of `projection`, the layer that projects the context
    into the predictor. Making A small would silence the noise, but the context with it, so that A cannot collapse.

    Args:
        base: the means ψ.
        projection: linear layer from encoder to predictor. It is not registered here: the model owns it.
        sigma: σ, or a function from the training step to σ; `set_step` evaluates it.
        apply_to: which tokens get noise: "masked" (the paper), "context", "both" or "none".
        covariance: "tied" (A is the projection's weight), "identity", "diagonal", "untied", "low_rank(r)" or the name of
            a registered `Covariance`.
        convention: "paper": σ is the variance of n, and a masked token is A n + ψ + m̃; the caller adds m̃.
            "std": σ is the standard deviation of n, and the masked token is the same.
            "release": σ is the standard deviation of n, and a masked token is A n + b + ψ with the projection's bias b,
            which is added here, and without m̃ (`adds_mask_token` is False).
        noise_scale: scales the noise of each image by its context (ours, not the paper's). With it, calls in training
            need `context`.
    """

    noise_std: Tensor
    """Standard deviation of n."""

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
        check_choice("apply_to", apply_to, get_args(ApplyTo))
        check_choice("convention", convention, get_args(Convention))
        if projection is not None and projection.out_features != base.dim:
            raise InputError(
                f"projection has {projection.out_features} output features and the positions {base.dim}: make them equal."
            )
        self.grid, self.dim, self.base = base.grid, base.dim, base
        self.apply_to, self.convention, self.noise_scale = apply_to, convention, noise_scale
        self.adds_mask_token = convention != "release"
        # In a tuple, so that the layer is not registered a second time.
        self._projection = (projection,)
        self.covariance_name, self.covariance = covariance, make_covariance(covariance, base.dim, projection)
        self.noise_dim = self.covariance.noise_dim
        if apply_to == "none":
            # Without noise there is no gradient, and DistributedDataParallel would wait for it.
            for part in filter(None, (self.covariance, noise_scale)):
                part.requires_grad_(False)
        self._sigma_at = sigma if callable(sigma) else None
        # A tensor, so that neither a compiled model nor a CUDA graph fixes its value.
        self.register_buffer("noise_std", torch.zeros(()), persistent=False)
        self.set_sigma(sigma(0) if callable(sigma) else sigma)

    def set_sigma(self, sigma: float) -> None:
        """Change σ."""
        if not (math.isfinite(sigma) and sigma >= 0):
            raise InputError(f"sigma is {sigma}: give 0 or a positive number.")
        self.sigma = float(sigma)
        self.noise_std.fill_(math.sqrt(sigma) if self.convention == "paper" else sigma)

    def set_step(self, step: int) -> None:
        """Set σ to its value at this training step, if it follows a schedule."""
        if self._sigma_at is not None:
            self.set_sigma(self._sigma_at(step))

    def table(self) -> Tensor:
        """Return the means ψ of the whole grid."""
        return self.base.table()

    def forward(
        self, indices: Tensor, *, tokens: Tokens = "masked", context: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Return ψ̂ of these patches in training, where noise applies to these tokens, and ψ otherwise."""
        mean = self.mean(indices, tokens=tokens)
        if noise is None:
            noise = self.draw_noise(indices, tokens=tokens)
        if noise is None:
            return mean
        noise_std = self.noise_std
        if self.noise_scale is not None:
            noise_std = noise_std * self.noise_scale.of_rows(context, len(indices)).to(noise_std)
        return stochastic_positions(mean, noise, noise_std, self.covariance)

    def mean(self, indices: Tensor, *, tokens: Tokens = "masked") -> Tensor:
        """Return the positions without noise."""
        positions = self.base(indices)
        # The release passes the noise through the whole linear layer: tokens without noise get no bias either.
        adds_bias = self.convention == "release" and tokens == "masked" and self.applies_to(tokens)
        bias = getattr(self._projection[0], "bias", None) if adds_bias else None
        return positions if bias is None else positions + bias

    def sample(self, indices: Tensor, *, tokens: Tokens = "masked", generator: torch.Generator | None = None) -> Tensor:
        """Return noisy positions, in training and evaluation mode; with a `noise_scale`, those of an average image."""
        noise = self.standard_normal(indices, generator)
        return stochastic_positions(self.mean(indices, tokens=tokens), noise, self.noise_std, self.covariance)

    def covariance_matrix(self) -> Tensor:
        """Return Σ, (dim, dim); with a `noise_scale`, its mean over images."""
        A = self.covariance.factor()
        return self.noise_std.square() * A @ A.T

    def noise_power(self) -> Tensor:
        """Return the trace of Σ, or 0 if no tokens get noise."""
        power = self.noise_std.square() * self.covariance.factor().square().sum()
        return torch.zeros_like(power) if self.apply_to == "none" else power

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, sigma={self.sigma:g}, apply_to={self.apply_to}, "
            f"covariance={self.covariance_name}, convention={self.convention}"
        )
