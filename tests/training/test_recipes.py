"""The recipes against the numbers of the paper and of its release."""

from dataclasses import fields, replace

import pytest
import torch

from stop_mim.data.augment import AugmentConfig
from stop_mim.errors import InputError
from stop_mim.masking import BlockwiseMasks, build_masks
from stop_mim.models.build import build_objective, build_positions
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.mae import MAE
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.sweeps.grid import changes
from stop_mim.training.recipes import RECIPES, find_recipe


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_builds_and_has_one_line_of_help(name):
    config = find_recipe(name)
    # Deeper ones are built below, or take long.
    shallow = replace(config, encoder=replace(config.encoder, depth=6), predictor=replace(config.predictor, depth=1))
    with torch.device("meta"):
        objective = build_objective(shallow)
    build_masks(config.masks, objective.encoder.grid)
    assert 20 < len(RECIPES.summary(name)) < 130


@pytest.mark.parametrize(
    ("size", "epochs", "lr", "final_lr", "warmup", "width", "depth", "patch", "predictor_depth"),
    [
        ("vitb16", 600, 8e-4, 1e-4, 15, 768, 12, 16, 6),
        ("vitl16", 600, 8e-4, 1e-4, 15, 1024, 24, 16, 12),
        ("vith14", 300, 1e-3, 1e-6, 40, 1280, 32, 14, 12),
        ("vith16", 300, 1e-3, 1e-6, 40, 1280, 32, 16, 12),
    ],
)
def test_what_the_authors_trained(size, epochs, lr, final_lr, warmup, width, depth, patch, predictor_depth):
    config = find_recipe(f"stop-{size}")
    optim, augment, masks, huge = config.optim, config.augment, config.masks, size.startswith("vith")
    assert (optim.epochs, optim.lr, optim.final_lr, optim.warmup_epochs) == (epochs, lr, final_lr, warmup)
    assert (optim.batch_size, optim.start_lr) == (2048, 2e-4)
    assert (optim.weight_decay, optim.final_weight_decay, optim.ema_start, optim.ema_final) == (0.04, 0.4, None, 1.0)
    assert optim.hold_after_epoch == (250 if huge else None)
    with torch.device("meta"):
        objective = build_objective(config)
    assert (objective.encoder.dim, objective.encoder.depth) == (width, depth)
    assert objective.encoder.patch_size == (patch, patch)
    assert len(objective.predictor.blocks) == predictor_depth
    assert objective.predictor.projection.out_features == 384
    assert objective.predictor.blocks[0].attn.num_heads == objective.encoder.heads
    assert (augment.crop_scale, augment.jitter_probability) == ((0.3, 1.0), 0)
    assert (augment.flip_probability, augment.blur_probability, augment.grey_probability) == (0.5, 0.5, 0.2)
    assert (augment.blur_sigma, masks.compat, config.encoder.initialisation) == ((0.1, 2.0), None, "scaled")
    assert (masks.n_blocks, masks.target_scale, masks.target_aspect) == (4, (0.15, 0.2), (0.75, 1.5))
    assert (masks.context_scale, masks.context_aspect) == ((0.85, 1.0), (1.0, 1.0))
    positions = build_positions(config.positions, (2, 2), torch.nn.Linear(4, 8))
    assert positions.noise_std**2 == pytest.approx(0.04 if huge else 0.0625)
    assert positions.adds_mask_token


@pytest.mark.parametrize("size", ["vitb16", "vitl16", "vith14"])
def test_ijepas_own_training_has_no_hold_and_no_augmentation(size):
    own, stop = find_recipe(f"ijepa-{size}"), find_recipe(f"stop-{size}")
    assert own.optim == replace(stop.optim, hold_after_epoch=None)
    assert (own.augment, own.positions.kind) == (AugmentConfig(), "sincos")
    assert replace(own, optim=stop.optim, augment=stop.augment, positions=stop.positions) == stop


def test_the_papers_text_has_a_variance_and_no_augmentation():
    for size in ("vitb16", "vith14"):
        config = find_recipe(f"stop-{size}", "paper-text")
        assert config.augment == AugmentConfig()
        assert build_positions(config.positions, (2, 2), torch.nn.Linear(4, 8)).noise_std ** 2 == 0.25
        assert find_recipe(f"ijepa-{size}", "paper-text").augment == AugmentConfig()


@pytest.mark.parametrize("name", [f"{kind}-{size}" for kind in ("stop", "ijepa") for size in ("vitb16", "vitl16")])
def test_compat_release_is_all_of_the_released_code(name):
    plain, config = find_recipe(name), find_recipe(name, "release")
    changed = {
        "encoder.initialisation": "release",
        "masks.compat": "release",
        "optim.decay_mask_token": True,
        "optim.ema_start": 0.996,
        **({"positions.convention": "release"} if name.startswith("stop") else {}),
    }
    assert changes(config, plain) == changed


def test_the_baselines_of_the_releases():
    """I-JEPA's is ψ + m̃; that of StoP's code is ψ alone, although m̃ exists."""
    positions = {}
    for name in ("ijepa-vitl16", "stop-vith16"):
        config = replace(find_recipe(name, "release").positions, kind="sincos")
        positions[name] = build_positions(config, (2, 2), torch.nn.Linear(4, 8))
        indices = torch.tensor([[0, 3]])
        assert torch.equal(positions[name](indices), SinCosPositions((2, 2), 8)(indices))
    assert [one.adds_mask_token for one in positions.values()] == [True, False]


def test_compat_is_refused_where_there_is_no_release():
    with pytest.raises(InputError, match=r"compat is release.*mae"):
        find_recipe("mae-vitb16", "release")


@pytest.mark.parametrize(
    ("plain", "stop"),
    [("ijepa-tiny-imagenet", "stop-tiny-imagenet")]
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
    ("name", "width", "depth", "patch", "masked"), [("mae-vitb16", 768, 12, 16, 147), ("mae-vith14", 1280, 32, 14, 192)]
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
