"""Build the parts of a model from its options; each objective has its builder in its own module."""

import dataclasses

from torch import nn

from stop_mim.errors import InputError
from stop_mim.models.config import EncoderConfig, ModelConfig, PositionsConfig
from stop_mim.models.encoder import SIZES, Encoder, create_encoder
from stop_mim.models.objective import OBJECTIVES, Objective
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import Grid, LearnedPositions, Positions, SinCosPositions, StochasticPositions


def build_objective(config: ModelConfig) -> Objective:
    """Build the objective of `objective.kind` with new weights."""
    return OBJECTIVES.find(config.objective.kind)(config)


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build an encoder with new weights."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    dimensions = dataclasses.replace(SIZES[config.size], **given)
    return create_encoder(dimensions, config.image_size, config.patch_size, config.initialisation)


def build_predictor(config: ModelConfig, encoder: Encoder, outputs: int | None = None) -> Predictor:
    """Build the predictor of an encoder, with the projection whose weight is A; `outputs` as in `Predictor`."""
    chosen = config.predictor
    if chosen.width % 4 and config.positions.kind != "learned":
        raise InputError(f"predictor.width is {chosen.width}: give a multiple of 4.")
    projection = context_projection(encoder.dim, chosen.width)
    positions = build_positions(config.positions, encoder.grid, projection)
    heads = chosen.heads or encoder.heads
    return Predictor(projection, positions, chosen.depth, heads, outputs, config.encoder.initialisation)


def build_positions(config: PositionsConfig, grid: Grid, projection: nn.Linear) -> Positions:
    """Build positions as wide as the projection's output."""
    width, release = projection.out_features, config.convention == "release"
    base = LearnedPositions(grid, width) if config.kind == "learned" else SinCosPositions(grid, width)
    if config.kind == "stochastic":
        return StochasticPositions(
            base, projection, config.sigma, config.apply_to, config.covariance, config.convention
        )
    # The release's baseline has no mask token.
    return StochasticPositions(base, projection, apply_to="none", convention="release") if release else base
