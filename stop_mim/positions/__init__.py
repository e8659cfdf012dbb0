"""Positions of patches as vectors: fixed (sine-cosine), learned, and stochastic (StoP, the paper's idea).

Everything here needs torch alone, so that it can be put into any masked-image model. `noise_scale` and `jittered` are
ours and not the paper's.
"""

from stop_mim.positions.covariance import (
    Covariance,
    DiagonalCovariance,
    FreeCovariance,
    IdentityCovariance,
    TiedCovariance,
    make_covariance,
)
from stop_mim.positions.deterministic import (
    PROJECTION_INIT_STD,
    ApplyTo,
    Grid,
    LearnedPositions,
    Positions,
    SinCosPositions,
    Tokens,
    as_grid,
    interpolate_table,
    sincos_frequencies,
    sincos_positions,
)
from stop_mim.positions.jittered import JitteredPositions, shifted_positions
from stop_mim.positions.noise_scale import NoiseScale
from stop_mim.positions.stochastic import Convention, StochasticPositions, stochastic_positions

__all__ = [
    "PROJECTION_INIT_STD",
    "ApplyTo",
    "Convention",
    "Covariance",
    "DiagonalCovariance",
    "FreeCovariance",
    "Grid",
    "IdentityCovariance",
    "JitteredPositions",
    "LearnedPositions",
    "NoiseScale",
    "Positions",
    "SinCosPositions",
    "StochasticPositions",
    "TiedCovariance",
    "Tokens",
    "as_grid",
    "interpolate_table",
    "make_covariance",
    "shifted_positions",
    "sincos_frequencies",
    "sincos_positions",
    "stochastic_positions",
]
