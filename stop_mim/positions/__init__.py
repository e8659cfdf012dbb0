"""Positions of patches as vectors: sine-cosine, learned, and stochastic (StoP, the paper's method).

This package needs torch alone, so that it fits into any masked-image model.
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
)
from stop_mim.positions.stochastic import StochasticPositions, stochastic_positions

__all__ = [
    "COVARIANCES",
    "PROJECTION_INIT_STD",
    "ApplyTo",
    "Convention",
    "Covariance",
    "Grid",
    "LearnedPositions",
    "Positions",
    "SinCosPositions",
    "StochasticPositions",
    "Tokens",
    "as_grid",
    "make_covariance",
    "sincos_frequencies",
    "stochastic_positions",
]
