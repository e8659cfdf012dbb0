"""The learned covariance Σ = σ A Aᵀ of the noise: its spectrum, which frequencies it blurs, and how it came about."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stop_mim.analysis.runs import RunRecords, load_weights, new_objective
from stop_mim.errors import InputError
from stop_mim.positions import Positions, SinCosPositions, StochasticPositions, sincos_frequencies
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.run_folder import RunFolder

AXES = ("columns", "rows")


@dataclass(frozen=True)
class NoiseSpectrum:
    """Σ in numbers."""

    eigenvalues: Float[Tensor, " dim"]
    """Variances along Σ's own directions, largest first."""
    effective_rank: float
    """In how many directions there is noise, as `effective_rank` counts them."""
    trace: float
    """E ‖ψ̂ - ψ‖², which is σ ‖A‖² (with the paper's sigma)."""
    variances: Float[Tensor, " dim"]
    """The variance of each feature: Σ's diagonal."""
    noise_to_signal: Float[Tensor, " dim"]
    """For each feature the standard deviation of its noise over the root mean square of ψ on the grid."""
    by_frequency: Float[Tensor, "2 n_frequencies"] | None
    """Mean variance of the sine and cosine of each frequency, of columns and of rows; None for learned positions."""
    frequencies: Float[Tensor, " n_frequencies"] | None
    """Radians per patch, highest first."""


def effective_rank(eigenvalues: Float[Tensor, " dim"]) -> float:
    """exp of the entropy of the eigenvalues, normed to sum 1: dim for equal ones, 1 if all but one are zero, 0 for none."""
    values = eigenvalues.double().clamp(min=0)
    if not values.sum() > 0:
        return 0.0
    parts = values / values.sum()
    return math.exp(torch.special.entr(parts).sum().item())


def noise_to_signal(
    covariance: Float[Tensor, "dim dim"], table: Float[Tensor, "n_patches dim"]
) -> Float[Tensor, " dim"]:
    """Standard deviation of the noise of each feature over the root mean square of its positions; inf where those are 0."""
    return covariance.diagonal().clamp(min=0).sqrt() / table.square().mean(0).sqrt()


def variance_by_frequency(variances: Float[Tensor, " dim"]) -> Float[Tensor, "2 n_frequencies"]:
    """The mean variance of sine and cosine, for columns and for rows, from variances in the order of sine-cosine features."""
    return variances.unflatten(0, (2, 2, -1)).mean(1)


@torch.no_grad()
def noise_spectrum(positions: Positions) -> NoiseSpectrum:
    """Σ in numbers; positions without a Σ are an InputError."""
    if not isinstance(positions, StochasticPositions) or positions.apply_to == "none":
        raise InputError(
            f"The positions are {type(positions).__name__} without a covariance of noise: name a run with stochastic positions."
        )
    # In double precision, where small eigenvalues are not lost beside large ones.
    A, table = positions.covariance.factor().double(), positions.table().double()
    covariance = positions.noise_std.double().square() * A @ A.T
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0).clamp(min=0)
    variances = covariance.diagonal()
    waves = isinstance(positions.base, SinCosPositions)
    return NoiseSpectrum(
        eigenvalues=eigenvalues,
        effective_rank=effective_rank(eigenvalues),
        trace=variances.sum().item(),
        variances=variances,
        noise_to_signal=noise_to_signal(covariance, table),
        by_frequency=variance_by_frequency(variances) if waves else None,
        frequencies=sincos_frequencies(positions.dim) if waves else None,
    )


@dataclass(frozen=True)
class NoiseHistory:
    """What the health signs say of the noise while a run trained."""

    steps: list[int]
    A_norm: list[float]
    mask_token_norm: list[float]
    noise_to_signal: list[float]


def noise_history(metrics: Sequence[dict[str, float]]) -> NoiseHistory:
    """|A|, |m̃| and noise-to-signal at every look at the health signs; empty lists where there was none."""
    lines = [line for line in metrics if "health/A_norm" in line]
    signs = ("A_norm", "mask_token_norm", "noise_to_signal")
    values = [[line[f"health/{sign}"] for line in lines] for sign in signs]
    return NoiseHistory([int(line["step"]) for line in lines], *values)


def spectra_over_training(run: RunRecords) -> Iterator[tuple[int, NoiseSpectrum]]:
    """Steps and spectra from all checkpoints that the run has kept, oldest first: its milestones and the newest."""
    objective = new_objective(run)
    for step, path in checkpoints_in(RunFolder(run.path).checkpoints).items():
        load_weights(objective, read_checkpoint(path), path)
        yield step, noise_spectrum(objective.positions)
