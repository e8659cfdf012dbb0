"""The recipes against the numbers of the paper and of its release."""

from dataclasses import fields

import pytest
import torch

from stop_mim.masking import BlockwiseMasks, build_masks
from stop_mim.models.build import build_objective, build_positions
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.mae import MAE
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.training.recipes import RECIPES, find_recipe, summary


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_builds_and_has_one_line_of_help(name):
    config = find_recipe(name)
    with torch.device("meta"):
        objective = build_objective(config)
    build_masks(config.masks, objective.encoder.grid)
    assert 20 < len(summary(name)) < 130


@pytest.mark.parametrize(
    ("name", "epochs", "lr", "final_lr", "warmup", "width", "depth", "patch", "predictor_depth"),
    [
        ("stop-vitb16", 600, 8e-4, 1e-4, 15, 768, 12, 16, 6),
        ("stop-vitl16", 600, 8e-4, 1e-4, 15, 1024, 24, 16, 12),
        ("stop-vith14", 300, 1e-3, 1e-6, 40, 1280, 32, 14, 12),
    ],
)
def test_the_papers_numbers(name, epochs, lr, final_lr, warmup, width, depth, patch, predictor_depth):
    config = find_recipe(name)
    optim = config.optim
    assert (optim.epochs, optim.lr, optim.final_lr, optim.warmup_epochs) == (epochs, lr, final_lr, warmup)
    assert (optim.batch_size, optim.start_lr) == (2048, 2e-4)
    assert (optim.weight_decay, optim.final_weight_decay, optim.ema_start, optim.ema_final) == (0.04, 0.4, 0.996, 1.0)
    assert optim.hold_after_epoch == (250 if name == "stop-vith14" else None)
    with torch.device("meta"):
        objective = build_objective(config)
    assert (objective.encoder.dim, objective.encoder.depth) == (width, depth)
    assert objective.encoder.patch_size == (patch, patch)
    assert len(objective.predictor.blocks) == predictor_depth
    assert objective.predictor.projection.out_features == 384
    assert objective.predictor.blocks[0].attn.num_heads == objective.encoder.heads
    assert config.augment.crop_scale == (0.3, 1.0)
    assert config.augment.flip_probability == config.augment.blur_probability == config.augment.grey_probability == 0
    assert (config.masks.n_blocks, config.masks.target_scale, config.masks.target_aspect) == (
        4,
        (0.15, 0.2),
        (0.75, 1.5),
    )
    assert (config.masks.context_scale, config.masks.context_aspect) == ((0.85, 1.0), (1.0, 1.0))
    assert (config.positions.sigma, config.positions.convention) == (0.25, "paper")


@pytest.mark.parametrize(
    ("plain", "stop"),
    [(f"ijepa-{size}", f"stop-{size}") for size in ("vitb16", "vitl16", "vith14", "tiny-imagenet")]
    + [(f"mae-{size}", f"stop-mae-{size}") for size in ("vitb16", "vitl16", "vith14", "tiny-imagenet")]
    + [(f"data2vec-{size}", f"stop-data2vec-{size}") for size in ("vitb16", "tiny-imagenet")],
)
def test_twins_differ_in_their_positions_alone(plain, stop):
    plain, stop = find_recipe(plain), find_recipe(stop)
    assert [field.name for field in fields(stop) if getattr(stop, field.name) != getattr(plain, field.name)] == [
        "positions"
    ]
    assert (stop.positions.sigma, stop.positions.covariance, stop.positions.convention) == (0.25, "tied", "paper")
    kinds = [type(build_positions(config.positions, (2, 2), torch.nn.Linear(4, 8))) for config in (plain, stop)]
    assert kinds == [SinCosPositions, StochasticPositions]


@pytest.mark.parametrize(
    ("name", "width", "depth", "patch", "masked"),
    [("mae-vitb16", 768, 12, 16, 147), ("mae-vith14", 1280, 32, 14, 192)],
)
def test_the_published_numbers_of_mae(name, width, depth, patch, masked):
    config = find_recipe(name)
    optim = config.optim
    assert (optim.epochs, optim.batch_size, optim.warmup_epochs, optim.betas) == (1600, 4096, 40, (0.9, 0.95))
    assert optim.lr == pytest.approx(1.5e-4 * optim.batch_size / 256)
    assert (optim.start_lr, optim.final_lr) == (0, 0)
    assert optim.weight_decay == optim.final_weight_decay == 0.05
    assert (config.augment.crop_scale, config.augment.flip_probability) == ((0.2, 1.0), 0.5)
    assert config.augment.jitter_probability == config.augment.blur_probability == config.augment.grey_probability == 0
    with torch.device("meta"):
        objective = build_objective(config)
    assert isinstance(objective, MAE)
    assert objective.norm_pixels
    assert (objective.encoder.dim, objective.encoder.depth, objective.encoder.patch_size) == (
        width,
        depth,
        (patch, patch),
    )
    assert (len(objective.decoder.blocks), objective.decoder.projection.out_features) == (8, 512)
    assert objective.decoder.blocks[0].attn.num_heads == 16
    assert objective.decoder.head.out_features == 3 * patch**2
    assert build_masks(config.masks, objective.encoder.grid).target_tokens == masked


def test_the_published_numbers_of_data2vec():
    config = find_recipe("data2vec-vitb16")
    optim = config.optim
    assert (optim.epochs, optim.batch_size, optim.lr, optim.warmup_epochs) == (800, 2048, 2e-3, 10)
    assert (optim.weight_decay, optim.final_weight_decay, optim.clip_gradient_norm) == (0.05, 0.05, 3.0)
    assert optim.ema_start == optim.ema_final == 0.9998
    with torch.device("meta"):
        objective = build_objective(config)
    assert isinstance(objective, Data2Vec)
    assert (objective.target_layers, objective.beta) == (6, 2.0)
    masks = build_masks(config.masks, objective.encoder.grid)
    assert isinstance(masks, BlockwiseMasks)
    assert masks.target_tokens == 120


@pytest.mark.parametrize(("name", "sigma"), [("stop-vitb16-release", 0.25), ("stop-vith16-release", 0.2)])
def test_released_variants(name, sigma):
    config = find_recipe(name)
    assert (config.positions.sigma, config.positions.convention, config.masks.compat) == (sigma, "release", "release")
    augment = config.augment
    assert (augment.flip_probability, augment.blur_probability, augment.grey_probability) == (0.5, 0.5, 0.2)
    assert config.encoder.patch_size == 16
    with torch.device("meta"):
        assert not build_objective(config).predictor.positions.adds_mask_token


def test_the_releases_baseline_is_the_position_alone():
    objective = build_objective(find_recipe("ijepa-vitb16-release"))
    positions = objective.predictor.positions
    torch.nn.init.ones_(objective.predictor.projection.bias)
    indices = torch.tensor([[0, 5]])
    assert torch.equal(positions(indices), positions.table()[indices])
    assert not positions.adds_mask_token
