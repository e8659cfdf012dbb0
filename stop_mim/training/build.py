"""From a configuration to the objects that it names."""

import dataclasses
import math

from torch import nn

from stop_mim.data.augment import Augment
from stop_mim.errors import InputError
from stop_mim.masking import BlockwiseMasks, MultiBlockMasks, RandomMasks
from stop_mim.models.data2vec import Data2Vec, MaskedInput, PatchProjection
from stop_mim.models.encoder import SIZES, Encoder, create_encoder
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.mae import MAE, Decoder
from stop_mim.models.objective import Objective
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
    if config.conditioned and config.kind != "stochastic":
        raise InputError(f"positions.conditioned is True and positions.kind {config.kind}: choose the kind stochastic.")
    if config.kind == "jittered":
        if config.convention == "release":
            raise InputError("positions.convention is release, which has no jittered positions: choose paper.")
        return JitteredPositions(grid, width, config.jitter_scale, config.jitter_learned, config.apply_to)
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
        noise_scale=NoiseScale(projection.in_features) if config.conditioned else None,
    )


def build_objective(config: TrainConfig, total_steps: int = 1) -> Objective:
    """Encoder, positions and what predicts, with new weights, as the objective that is named."""
    builders = {"ijepa": build_ijepa, "mae": build_mae, "data2vec": build_data2vec}
    return builders[config.objective.kind](config, total_steps)


def build_ijepa(config: TrainConfig, total_steps: int = 1) -> IJEPA:
    """I-JEPA with new weights."""
    encoder = build_encoder(config.encoder)
    projection, positions = _build_projection(config, encoder, total_steps)
    predictor = Predictor(
        projection,
        positions,
        config.predictor.depth,
        config.predictor.heads or encoder.heads,
        shared_context=config.predictor.shared_context,
    )
    chosen = config.objective
    return IJEPA(encoder, predictor, chosen.target_layers, chosen.beta, chosen.target_resolution, chosen.l1_strength)


def build_mae(config: TrainConfig, total_steps: int = 1) -> MAE:
    """MAE with new weights; its decoder is what the predictor group says."""
    encoder = build_encoder(config.encoder)
    projection, positions = _build_projection(config, encoder, total_steps)
    depth, heads = config.predictor.depth, config.predictor.heads or encoder.heads
    decoder = Decoder(projection, positions, 3 * math.prod(encoder.patch_size), depth, heads)
    return MAE(encoder, decoder, config.objective.norm_pixels)


def build_data2vec(config: TrainConfig, total_steps: int = 1) -> Data2Vec:
    """data2vec with new weights."""
    if config.positions.kind == "learned":
        raise InputError(
            "positions.kind is learned: data2vec's student and teacher share the encoder's positions, which are fixed; "
            "choose another kind."
        )
    if config.masks.kind == "multiblock":
        raise InputError(
            "masks.kind is multiblock: data2vec shows all that it does not mask; choose blockwise or random."
        )
    encoder = build_encoder(config.encoder)
    projection = PatchProjection(encoder.vit.patch_embed.proj)
    masked_input = MaskedInput(projection, _build_positions(config, encoder, projection, total_steps))
    return Data2Vec(encoder, masked_input, config.objective.target_layers, config.objective.beta)


def _build_projection(config: TrainConfig, encoder: Encoder, total_steps: int) -> tuple[nn.Linear, Positions]:
    fits_waves = config.predictor.width % 4 == 0 or config.positions.kind == "learned"
    if config.predictor.width < 4 or not fits_waves or config.predictor.depth < 1:
        raise InputError(
            f"predictor.width is {config.predictor.width} and predictor.depth {config.predictor.depth}: the width must be a "
            "multiple of 4 and the depth at least 1."
        )
    projection = context_projection(encoder.dim, config.predictor.width)
    return projection, _build_positions(config, encoder, projection, total_steps)


def _build_positions(config: TrainConfig, encoder: Encoder, projection: nn.Linear, total_steps: int) -> Positions:
    try:
        return build_positions(config.positions, encoder.grid, projection, total_steps)
    except ValueError as error:
        raise InputError(f"The positions cannot be made: {error}") from error


def build_masks(config: MaskConfig, grid: tuple[int, int]) -> MultiBlockMasks | RandomMasks | BlockwiseMasks:
    """The sampler of masks."""
    if config.kind == "random":
        return RandomMasks(grid, config.mask_ratio)
    if config.kind == "blockwise":
        return BlockwiseMasks(grid, config.mask_ratio, config.target_scale, config.target_aspect)
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
