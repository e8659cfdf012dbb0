"""From the options of a model to its parts. The objectives themselves are built beside their classes."""

import dataclasses
import math
from collections.abc import Callable

from torch import nn

from stop_mim.errors import InputError
from stop_mim.models.config import EncoderConfig, ModelConfig, PositionsConfig
from stop_mim.models.encoder import SIZES, Encoder, create_encoder
from stop_mim.models.objective import OBJECTIVES, Objective
from stop_mim.models.predictor import context_projection
from stop_mim.positions import (
    Grid,
    JitteredPositions,
    LearnedPositions,
    NoiseScale,
    Positions,
    SinCosPositions,
    StochasticPositions,
)
from stop_mim.registry import Registry

PositionsBuilder = Callable[[PositionsConfig, Grid, nn.Linear, int], Positions]
POSITIONS: Registry[PositionsBuilder] = Registry("kind of positions", __name__)
"""Functions from options, grid, projection and total number of steps to positions, by `positions.kind`."""


def build_objective(config: ModelConfig, total_steps: int = 1) -> Objective:
    """Build the objective of `objective.kind` with new weights."""
    return OBJECTIVES.find(config.objective.kind)(config, total_steps)


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build an encoder with new weights."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    dimensions = dataclasses.replace(SIZES[config.size], **given)
    return create_encoder(dimensions, config.image_size, config.patch_size)


def build_projection(config: ModelConfig, encoder: Encoder, total_steps: int) -> tuple[nn.Linear, Positions]:
    """Build the projection from encoder to predictor, with weight A, and the predictor's positions."""
    width = config.predictor.width
    if width % 4 and config.positions.kind != "learned":
        raise InputError(f"predictor.width is {width}: give a multiple of 4.")
    projection = context_projection(encoder.dim, width)
    return projection, build_positions(config.positions, encoder.grid, projection, total_steps)


def build_positions(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int = 1) -> Positions:
    """Build positions as wide as the projection's output."""
    return POSITIONS.find(config.kind)(config, grid, projection, total_steps)


@POSITIONS.register("stochastic")
def _stochastic(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int) -> Positions:
    return StochasticPositions(
        SinCosPositions(grid, projection.out_features),
        projection,
        sigma=sigma_schedule(config, total_steps),
        apply_to=config.apply_to,
        covariance=config.covariance,
        convention=config.convention,
        noise_scale=NoiseScale(projection.in_features) if config.conditioned else None,
    )


@POSITIONS.register("sincos")
def _sincos(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int) -> Positions:
    return _without_noise(config, SinCosPositions(grid, projection.out_features), projection)


@POSITIONS.register("learned")
def _learned(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int) -> Positions:
    return _without_noise(config, LearnedPositions(grid, projection.out_features), projection)


@POSITIONS.register("jittered")
def _jittered(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int) -> Positions:
    if config.convention == "release":
        raise InputError("positions.convention is release, which has no jittered positions: choose paper.")
    return JitteredPositions(grid, projection.out_features, config.jitter_scale, config.jitter_learned, config.apply_to)


def _without_noise(config: PositionsConfig, positions: Positions, projection: nn.Linear) -> Positions:
    """Return the positions of a deterministic baseline; the release's has no mask token."""
    if config.convention == "paper":
        return positions
    return StochasticPositions(positions, projection, config.sigma, apply_to="none", convention="release")


def sigma_schedule(config: PositionsConfig, total_steps: int) -> float | Callable[[int], float]:
    """Return sigma as a number, or as a function of the step if it changes during the run."""
    if config.sigma_start is None or config.sigma_start == config.sigma:
        return config.sigma
    start, final = config.sigma_start, config.sigma

    def sigma_at(step: int) -> float:
        progress = min(step / max(total_steps - 1, 1), 1.0)
        if config.sigma_schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return start + (final - start) * progress

    return sigma_at
