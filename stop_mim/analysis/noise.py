"""What noise does to positions: the spectrum of Σ = σ A Aᵀ, similarity of samples to fixed positions, decoding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.positions import Positions, SinCosPositions, StochasticPositions, sincos_frequencies


@dataclass(frozen=True)
class NoiseSpectrum:
    """The covariance Σ of the noise in numbers."""

    eigenvalues: Float[Tensor, " dim"]
    """Variances along the eigenvectors of Σ, largest first."""
    effective_rank: float
    """Number of directions with noise, see `effective_rank`."""
    trace: float
    """E ‖ψ̂ - ψ‖², which is σ ‖A‖² (with the paper's sigma)."""
    by_frequency: Float[Tensor, "2 n_frequencies"] | None
    """Mean variance of the sine and cosine of each frequency, for columns and rows; None for learned positions."""
    frequencies: Float[Tensor, " n_frequencies"] | None
    """Radians per patch, highest first."""


def effective_rank(eigenvalues: Float[Tensor, " dim"]) -> float:
    """Return exp of the entropy of the eigenvalues, normed to sum 1: dim if all are equal, 1 if one is not zero."""
    values = eigenvalues.double().clamp(min=0)
    if not values.sum() > 0:
        return 0.0
    return math.exp(torch.special.entr(values / values.sum()).sum().item())


@torch.no_grad()
def noise_spectrum(positions: Positions) -> NoiseSpectrum:
    """Return the spectrum of Σ; positions without noise are an InputError."""
    if not isinstance(positions, StochasticPositions) or not positions.noise_power() > 0:
        raise InputError("These positions have no noise: name a run with stochastic positions and a sigma above 0.")
    # In double precision, so that small eigenvalues are not lost next to large ones.
    A = positions.covariance.factor().double()
    covariance = positions.noise_std**2 * A @ A.T
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0).clamp(min=0)
    variances = covariance.diagonal()
    waves = isinstance(positions.base, SinCosPositions)
    return NoiseSpectrum(
        eigenvalues=eigenvalues,
        effective_rank=effective_rank(eigenvalues),
        trace=variances.sum().item(),
        # Features are sines and cosines of columns, then of rows.
        by_frequency=variances.unflatten(0, (2, 2, -1)).mean(1) if waves else None,
        frequencies=sincos_frequencies(positions.dim) if waves else None,
    )


@dataclass(frozen=True)
class SimilarityMaps:
    """Cosines of a patch's position to the fixed positions ψ of the whole grid."""

    fixed: Float[Tensor, "rows columns"]
    """Of its fixed position."""
    sample: Float[Tensor, "rows columns"]
    """Of one noisy position."""
    mean: Float[Tensor, "rows columns"]
    """Of noisy positions, averaged."""


def cosines(queries: Float[Tensor, "n dim"], positions: Float[Tensor, "m dim"]) -> Float[Tensor, "n m"]:
    """Return the cosine similarity of every query to every position."""
    return F.normalize(queries.double(), dim=1) @ F.normalize(positions.double(), dim=1).T


def noisy_positions(
    positions: Positions, patch: int, draws: int, generator: torch.Generator
) -> Float[Tensor, "draws dim"]:
    """Sample ψ̂ of a patch, without the mask token or bias of masked tokens."""
    indices = torch.full((1, draws), patch)
    if isinstance(positions, StochasticPositions):
        return positions.sample(indices, generator)[0]
    return positions(indices)[0]


@torch.no_grad()
def similarity_maps(positions: Positions, patch: int, generator: torch.Generator, draws: int) -> SimilarityMaps:
    """Compare a patch's position with all fixed ones: without noise, with one sample, and averaged over samples."""
    samples, table = noisy_positions(positions, patch, draws, generator), positions.table()
    fixed, noisy = cosines(table[patch][None], table)[0], cosines(samples, table)
    return SimilarityMaps(*(part.unflatten(0, positions.grid) for part in (fixed, noisy[0], noisy.mean(0))))


@torch.no_grad()
def sampled_places(
    positions: StochasticPositions, patches: Sequence[int], generator: torch.Generator, draws: int
) -> Float[Tensor, "n draws 2"]:
    """Return where samples of patches' positions lie in the image, as columns and rows of patches.

    A place is read from a position by the linear map with the least mean squared error for this Σ.
    """
    table, covariance = positions.table().double(), positions.covariance_matrix().double()
    rows, columns = positions.grid
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1).double()
    mean, middle = table.mean(0), places.mean(0)
    spread = (table - mean).T @ (table - mean) / len(table) + covariance
    # Few patches do not span all directions: those without variance are not read.
    reading = torch.linalg.pinv(spread, rtol=1e-9, hermitian=True) @ (table - mean).T @ (places - middle) / len(table)
    samples = torch.stack([noisy_positions(positions, patch, draws, generator) for patch in patches]).double()
    return (samples - mean) @ reading + middle


@torch.no_grad()
def identified(positions: StochasticPositions, generator: torch.Generator, draws: int) -> float:
    """Return the fraction of samples that the optimal decoder, which knows Σ, assigns to their patch.

    Cosines may fall a lot while a sample still identifies its patch: many features together average the noise away.
    """
    table = positions.table().double()
    patches = torch.arange(len(table)).repeat_interleave(draws)
    samples = positions.sample(patches[None], generator)[0].double()
    covariance = positions.covariance_matrix().double()
    # Σ may be singular: directions without noise count as precise to the rounding of single precision.
    floor = 1e-9 * covariance.trace().clamp(min=1e-9)
    precise = torch.linalg.solve(covariance + floor * torch.eye(len(covariance), dtype=torch.float64), table.T)
    scores = samples @ precise - 0.5 * (table * precise.T).sum(1)
    return (scores.argmax(1) == patches).double().mean().item()
