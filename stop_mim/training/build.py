"""From a configuration to the objects that it names."""

import dataclasses

from torch import nn

from stop_mim.data.augment import Augment
from stop_mim.errors import InputError
from stop_mim.masking import MultiBlockMasks, RandomMasks
from stop_mim.models.encoder import SIZES, Encoder, create_encoder
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import Grid, LearnedPositions, Positions, SinCosPositions, StochasticPositions
from stop_mim.training.config import EncoderConfig, MaskConfig, PositionsConfig, TrainConfig
from stop_mim.training.schedules import sigma_schedule


def build_encoder(config: EncoderConfig) -> Encoder:
    """The encoder with new weights."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    dimensions = dataclasses.replace(SIZES[config.size], **given)
    return create_encoder(dimensions, config.image_size, config.patch_size, config.drop_path)


def build_positions(config: PositionsConfig, grid: Grid, projection: nn.Linear, total_steps: int = 1) -> Positions:
    """The predictor's positions; the release's fixed ones are stochastic ones whose noise goes nowhere."""
    width = projection.out_features
    base = LearnedPositions(grid, width) if config.kind == "learned" else SinCosPositions(grid, width)
    if config.kind != "stochastic" and config.convention == "paper":
        return base
    return StochasticPositions(
        base,
        projection,
        sigma=sigma_schedule(config, total_steps),
        apply_to=config.apply_to if config.kind == "stochastic" else "none",
        covariance=config.covariance,
        convention=config.convention,
    )


def build_objective(config: TrainConfig, total_steps: int = 1) -> IJEPA:
    """Encoder, positions and predictor with new weights, as one objective."""
    encoder = build_encoder(config.encoder)
    if config.predictor.width < 4 or config.predictor.depth < 1:
        raise InputError(
            f"predictor.width is {config.predictor.width} and predictor.depth {config.predictor.depth}: the width must be a "
            "multiple of 4 and the depth at least 1."
        )
    projection = context_projection(encoder.dim, config.predictor.width)
    try:
        positions = build_positions(config.positions, encoder.grid, projection, total_steps)
    except ValueError as error:
        raise InputError(f"The positions cannot be made: {error}") from error
    heads = config.predictor.heads or encoder.heads
    return IJEPA(encoder, Predictor(projection, positions, config.predictor.depth, heads))


def build_masks(config: MaskConfig, grid: tuple[int, int]) -> MultiBlockMasks | RandomMasks:
    """The sampler of masks."""
    if config.kind == "random":
        return RandomMasks(grid, config.mask_ratio)
    return MultiBlockMasks(
        grid,
        config.n_blocks,
        config.target_scale,
        config.target_aspect,
        config.context_scale,
        config.context_aspect,
        config.target_tokens,
        config.context_tokens,
        config.compat,
    )


def build_augment(config: TrainConfig, encoder: Encoder) -> Augment:
    """The augmentation to the encoder's image size and normalisation."""
    return Augment(config.augment, config.encoder.image_size, encoder.mean, encoder.std)
