"""Counted operations against those that torch counts while a step runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stop_mim.benchmark.flops import TokenCounts, learned_flops, step_flops, target_flops
from stop_mim.training.build import build_masks, build_objective
from stop_mim.training.config import (
    EncoderConfig,
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    TrainConfig,
)

IMAGES = 3
PREDICTOR = PredictorConfig(width=16, depth=2, heads=2)


def config_of(kind="ijepa", positions=None, masks="multiblock"):
    return TrainConfig(
        objective=ObjectiveConfig(kind=kind),
        encoder=EncoderConfig("tiny", image_size=(48, 64), patch_size=8, width=24, depth=3, heads=2),
        predictor=PREDICTOR,
        positions=positions or PositionsConfig(),
        masks=MaskConfig(kind=masks),
    )


def counted(work):
    # Attention as two products, since fused kernels compute the first of them again in the backward pass.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


CONFIGS = {
    "I-JEPA": config_of(positions=PositionsConfig(kind="sincos")),
    "StoP": config_of(),
    "StoP, noise of low rank on all tokens": config_of(
        positions=PositionsConfig(covariance="low_rank(5)", apply_to="both")
    ),
    "StoP with diagonal noise": config_of(positions=PositionsConfig(covariance="diagonal")),
    "StoP without noise": config_of(positions=PositionsConfig(sigma=0.0)),
    "MAE": config_of("mae", masks="random"),
    "data2vec": config_of("data2vec", masks="blockwise"),
}


def left_out(config, counts):
    """What the predictor's last layer spares by leaving the context's tokens out of its MLP, which is counted all the same."""
    if config.objective.kind == "data2vec":
        return 0
    return IMAGES * counts.blocks * counts.context * 2 * 2 * config.predictor.width * 4 * config.predictor.width


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_step_asks_for_what_torch_counts(config):
    objective = build_objective(config)
    grid = objective.encoder.grid
    masks = build_masks(config.masks, grid).sample(IMAGES)
    images = torch.randn(IMAGES, 3, *config.encoder.image_size)
    counts = TokenCounts.of(masks, grid)
    forward = IMAGES * (
        sum(part.forward for part in learned_flops(config, counts).values()) + target_flops(config, counts)
    )
    spared = left_out(config, counts)
    assert counted(lambda: objective(images, masks)) == forward - spared
    assert counted(lambda: objective(images, masks).backward()) == step_flops(config, counts, IMAGES) - 3 * spared


def test_counts_are_those_of_the_masks():
    masks = build_masks(MaskConfig(context_tokens=10, target_tokens=5), (6, 8)).sample(2)
    assert TokenCounts.of(masks, (6, 8)) == TokenCounts(grid=48, context=10, blocks=4, target=5)
