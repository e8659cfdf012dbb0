"""Positions of patches as vectors: sine-cosine, learned, and stochastic (StoP, the paper's method).

This package needs torch alone, so that it fits into any masked-image model. `NoiseScale` and `jittered` are ours and
not the paper's.
"""

from stop_mim.options import ApplyTo, Convention
from stop_mim.positions.covariance import COVARIANCES, Covariance, make_covariance
from stop_mim.positions.deterministic import (
    PROJECTION_INIT_STD,
    Grid,
    LearnedPositions,
    Positions,
    SinCosPositions,
    Tokens,
    as_grid,
    sincos_frequencies,
    sincos_positions,
)
from stop_mim.positions.jittered import JitteredPositions, shifted_positions
from stop_mim.positions.stochastic import NoiseScale, StochasticPositions, stochastic_positions

__all__ = [
    "COVARIANCES",
    "PROJECTION_INIT_STD",
    "ApplyTo",
    "Convention",
    "Covariance",
    "Grid",
    "JitteredPositions",
    "LearnedPositions",
    "NoiseScale",
    "Positions",
    "SinCosPositions",
    "StochasticPositions",
    "Tokens",
    "as_grid",
    "make_covariance",
    "shifted_positions",
    "sincos_frequencies",
    "sincos_positions",
    "stochastic_positions",
]
