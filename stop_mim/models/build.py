"""Build the parts of a model from its options; each objective has its builder in its own module."""

import dataclasses
import math
from collections.abc import Callable

from torch import nn

from stop_mim.errors import InputError
from stop_mim.models.config import EncoderConfig, ModelConfig, PositionsConfig
from stop_mim.models.encoder import SIZES, Encoder, create_encoder
from stop_mim.models.objective import OBJECTIVES, Objective
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import (
    Grid,
    JitteredPositions,
    LearnedPositions,
    NoiseScale,
    Positions,
    SinCosPositions,
    StochasticPositions,
)


def build_objective(config: ModelConfig, total_steps: int = 1) -> Objective:
    """Build the objective of `objective.kind` with new weights."""
    return OBJECTIVES.find(config.objective.kind)(config, total_steps)


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build an encoder with new weights."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    dimensions = dataclasses.replace(SIZES[config.size], **given)
    return create_encoder(dimensions, config.image_size, config.patch_size, config.initialisation)


def build_predictor(config: ModelConfig, encoder: Encoder, total_steps: int, outputs: int | None = None) -> Predictor:
    """Build the predictor of an encoder, with the projection whose weight is A; `outputs` as in `Predictor`."""
    chosen = config.predictor
    if chosen.width % 4 and config.positions.kind != "learned":
        raise InputError(f"predictor.width is {chosen.width}: give a multiple of 4.")
    projection = context_projection(encoder.dim, chosen.width)
    positions = build_positions(config.positions, encoder.grid, projection, total_steps)
    heads = chosen.heads or encoder.heads
    return Predictor(projection, positions, chosen.depth, heads, outputs, config.encoder.initialisation)


def build_positions(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int = 1) -> Positions:
    """Build positions as wide as the projection's output."""
    width, release = projection.out_features, config.convention == "release"
    if config.kind == "jittered":
        if release:
            raise InputError("positions.convention is release, which has no jittered positions: choose paper.")
        return JitteredPositions(grid, width, config.jitter_scale, config.apply_to)
    base = LearnedPositions(grid, width) if config.kind == "learned" else SinCosPositions(grid, width)
    if config.kind == "stochastic":
        return StochasticPositions(
            base,
            projection,
            sigma=sigma_schedule(config, total_steps),
            apply_to=config.apply_to,
            covariance=config.covariance,
            convention=config.convention,
            noise_scale=NoiseScale(projection.in_features) if config.conditioned else None,
        )
    # The release's baseline has no mask token.
    return StochasticPositions(base, projection, apply_to="none", convention="release") if release else base


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
