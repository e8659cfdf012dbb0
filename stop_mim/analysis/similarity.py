"""What noise does to positions: how alike a noisy one is to all fixed ones, and whether it still tells its patch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.positions import JitteredPositions, Positions, StochasticPositions

NoisyPositions = StochasticPositions | JitteredPositions


@dataclass(frozen=True)
class SimilarityMaps:
    """Cosines of a query position to the fixed positions ψ of the whole grid."""

    fixed: Float[Tensor, "rows columns"]
    """Of the fixed position itself."""
    sample: Float[Tensor, "rows columns"]
    """Of one noisy position."""
    mean: Float[Tensor, "rows columns"]
    """Of noisy positions, averaged over them."""


def cosines(queries: Float[Tensor, "n dim"], positions: Float[Tensor, "m dim"]) -> Float[Tensor, "n m"]:
    """Cosine similarity of every query to every position."""
    return F.normalize(queries.double(), dim=1) @ F.normalize(positions.double(), dim=1).T


def noisy_positions(
    positions: Positions, patch: int, draws: int, generator: torch.Generator
) -> Float[Tensor, "draws dim"]:
    """Samples ψ̂ of a patch's position, without m̃ or a bias that marks masked tokens."""
    if not 0 <= patch < len(positions.table()):
        rows, columns = positions.grid
        raise InputError(f"The patch is {patch}: give one of 0 to {rows * columns - 1}, of {rows}x{columns} patches.")
    indices = torch.full((1, draws), patch)
    with torch.no_grad():
        if isinstance(positions, StochasticPositions):
            # The release adds a bias to masked tokens; context tokens have the position alone.
            return positions.sample(indices, tokens="context", generator=generator)[0]
        if isinstance(positions, JitteredPositions):
            return positions.sample(indices, generator=generator)[0]
        return positions(indices)[0]


@torch.no_grad()
def similarity_maps(positions: Positions, patch: int, generator: torch.Generator, draws: int = 256) -> SimilarityMaps:
    """How alike one patch's position is to all others: without noise, with one sample of it, and on average."""
    samples, table = noisy_positions(positions, patch, draws, generator), positions.table()
    fixed, noisy = cosines(table[patch][None], table)[0], cosines(samples, table)
    return SimilarityMaps(*(part.unflatten(0, positions.grid) for part in (fixed, noisy[0], noisy.mean(0))))


@torch.no_grad()
def most_similar(
    positions: Positions, patch: int, generator: torch.Generator, draws: int = 256
) -> Int[Tensor, " draws"]:
    """For each sample of a patch's position the patch whose fixed position is most like it by cosine."""
    return cosines(noisy_positions(positions, patch, draws, generator), positions.table()).argmax(1)


@torch.no_grad()
def identified(positions: StochasticPositions, generator: torch.Generator, draws: int = 64) -> float:
    """The part of samples from which the best of all decoders, which knows Σ, tells the right patch; chance is 1 / patches.

    Cosines may fall a lot while a sample still tells its place: many features together average the noise away.
    """
    table = positions.table().double()
    patches = torch.arange(len(table)).repeat_interleave(draws)
    samples = positions.sample(patches[None], tokens="context", generator=generator)[0].double()
    covariance = positions.covariance_matrix().double()
    # A direction without noise would tell everything; so it does, to the rounding of single precision.
    floor = 1e-9 * covariance.trace().clamp(min=1e-9)
    precise = torch.linalg.solve(covariance + floor * torch.eye(len(covariance), dtype=torch.float64), table.T)
    scores = samples @ precise - 0.5 * (table * precise.T).sum(1)
    return (scores.argmax(1) == patches).double().mean().item()
