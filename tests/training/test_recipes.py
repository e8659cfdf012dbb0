"""The recipes against the numbers of the paper and of its release."""

from dataclasses import fields

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.training.build import build_masks, build_objective
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


@pytest.mark.parametrize("size", ["vitb16", "vitl16", "vith14", "tiny-imagenet"])
def test_twins_differ_in_their_positions_alone(size):
    stop, ijepa = find_recipe(f"stop-{size}"), find_recipe(f"ijepa-{size}")
    assert [field.name for field in fields(stop) if getattr(stop, field.name) != getattr(ijepa, field.name)] == [
        "positions"
    ]
    with torch.device("meta"):
        assert isinstance(build_objective(ijepa).predictor.positions, SinCosPositions)
        assert isinstance(build_objective(stop).predictor.positions, StochasticPositions)


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


def test_an_unknown_recipe_is_refused():
    with pytest.raises(InputError, match="There is no recipe 'vit'"):
        find_recipe("vit")
