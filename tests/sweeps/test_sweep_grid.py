"""The named grids ask what the paper's tables and figures ask, and overrides become options of the command line."""

import math

import pytest
import torch
import tyro

from stop_mim.errors import InputError
from stop_mim.models.build import build_objective
from stop_mim.sweeps.grid import SWEEPS, as_flags, changes, with_overrides
from stop_mim.sweeps.plan import SweepConfig, base_config, make_plan
from stop_mim.sweeps.scales import SCALES
from stop_mim.training.config import TrainConfig
from stop_mim.training.recipes import find_recipe

NAMES = ["positions", "covariance", "tokens", "resolution", "regularisation", "sigma", "convention", "masking"]


def values(name, field):
    return [variant.get(field) for variant in SWEEPS[name]().variants.values()]


@pytest.mark.parametrize("name", NAMES)
def test_grids_are_well_formed(name):
    sweep = SWEEPS[name]()
    variants = sweep.variants
    assert sweep.baseline in variants
    # Variants differ, and none depends on the recipe's positions.
    assert len({str(sorted(changed.items(), key=str)) for changed in variants.values()}) == len(variants) > 1
    assert all("positions.kind" in changed for changed in variants.values())
    assert all(set(variant) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for variant in variants)


@pytest.mark.parametrize("scale", SCALES)
def test_every_variant_is_a_valid_config_at_every_scale(scale):
    for name in NAMES:
        plan = make_plan(name, SweepConfig(scale=scale, data="scenes"))
        assert len(plan.jobs) == 3 * len(plan.variants)


def test_grids_ask_what_the_paper_asks():
    assert list(SWEEPS) == [*NAMES, "vary"]
    assert values("positions", "positions.kind") == ["sincos", "learned", "stochastic"]
    assert values("tokens", "positions.apply_to") == ["none", "context", "both", "masked"]
    assert values("resolution", "objective.target_resolution") == ["full", "bilinear", "max", "full"]
    assert values("regularisation", "objective.l1_strength") == [0, 0.01, 0.1, 1, 0]
    assert set(values("regularisation", "positions.kind")[:-1]) == {"sincos"}
    assert values("sigma", "positions.sigma") == [0, 0.001, 0.01, 0.1, 0.25, 1, 10]


def test_fields_are_varied_in_every_combination():
    axes = {"optim.lr": [5e-4, 1e-3], "encoder.image_size": [(64, 64)]}
    plan = make_plan("vary", SweepConfig(), axes=axes)
    assert plan.variants == {
        "lr-0.0005-image_size-64-64": {"optim.lr": 5e-4, "encoder.image_size": (64, 64)},
        "lr-0.001-image_size-64-64": {"optim.lr": 1e-3, "encoder.image_size": (64, 64)},
    }
    assert (plan.baseline, str(plan.out)) == ("lr-0.0005-image_size-64-64", "runs/sweep-vary-lr-image_size-demo")
    both = make_plan("tokens", SweepConfig(), axes={"encoder.width": [48, 64], "predictor.width": [32, 64]})
    assert len(both.variants) == 4 * 4
    assert both.baseline == "none-encoder.width-48-predictor.width-32"
    with pytest.raises(InputError, match="--vary FIELD"):
        make_plan("vary", SweepConfig())


def test_a_field_has_no_fields_of_its_own():
    for given in ({"seed": 1, "seed.x": 2}, {"seed.x": 2, "seed": 1}):
        with pytest.raises(InputError, match=r"'seed\.x' and 'seed' are both given"):
            with_overrides(TrainConfig(), given)


def test_a_group_and_one_of_its_fields_are_both_applied():
    given = {"positions.sigma": 0.1, "positions": {"apply_to": "both"}}
    positions = with_overrides(TrainConfig(), given).positions
    assert (positions.sigma, positions.apply_to) == (0.1, "both")
    assert given == {"positions.sigma": 0.1, "positions": {"apply_to": "both"}}


def test_learned_and_fixed_covariance_are_compared_at_the_same_sigmas():
    grid = SWEEPS["covariance"]().variants
    sigmas = {
        kind: [changed["positions.sigma"] for name, changed in grid.items() if name.startswith(kind)]
        for kind in ("learned", "fixed")
    }
    assert sigmas["learned"] == sigmas["fixed"][2:] == [0.05, 0.1, 0.25, 0.5, 1.0]
    # The noise of the fixed ones reaches below that of the learned ones, which begin with ‖A‖² = 0.02² a entry.
    for width, encoder_width in ((64, 96), (192, 384), (384, 768)):
        learned = [sigma * 0.02**2 * width * encoder_width for sigma in sigmas["learned"]]
        fixed = [sigma * width for sigma in sigmas["fixed"]]
        assert fixed[0] < learned[0] < learned[-1] < fixed[-1]
    forms = {changed.get("positions.covariance") for changed in grid.values()}
    assert forms >= {"identity", "untied", "diagonal", "low_rank(8)", "low_rank(32)"}


def test_the_conventions_are_also_compared_at_the_same_noise():
    base, power = base_config(SweepConfig()), {}
    for name, overrides in SWEEPS["convention"]().variants.items():
        torch.manual_seed(0)
        power[name] = build_objective(with_overrides(base, overrides)).positions.noise_power().item()
    assert power["std"] == pytest.approx(power["release"])
    assert power["paper"] == pytest.approx(4 * power["release"])
    assert power["sincos-paper"] == power["sincos-release"] == 0


@pytest.mark.parametrize(("scale", "epochs"), [("demo", 12), ("tiny-imagenet", 54), ("imagenet", 300)])
def test_the_warm_up_keeps_its_fraction_of_the_epochs(scale, epochs):
    usual, longer = (base_config(SweepConfig(scale=scale, epochs=asked)).optim for asked in (None, 3 * epochs))
    assert (usual.epochs, longer.epochs) == (epochs, 3 * epochs)
    assert math.isclose(longer.warmup_epochs, 3 * usual.warmup_epochs)


def test_the_options_of_a_config_make_the_same_config():
    recipe = find_recipe("stop-vitb16")
    overrides = {
        "seed": 3,
        "encoder.image_size": (64, 32),
        "positions.sigma": 1e-05,
        "masks.compat": "release",
        "speed.compile": False,
        "log.tensorboard": not recipe.log.tensorboard,
        "checkpoint.milestone_every_epochs": None,
    }
    config = with_overrides(recipe, overrides)
    changed = changes(config, recipe)
    assert changed == overrides
    assert tyro.cli(TrainConfig, default=recipe, args=as_flags(changed, config)) == config
