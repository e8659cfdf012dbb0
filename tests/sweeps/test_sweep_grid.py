"""The named grids: what they ask is what the paper's tables and figures ask."""

import math

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.grid import SWEEPS, find_sweep, with_overrides
from stop_mim.sweeps.plan import Plan
from stop_mim.sweeps.probe import Probe
from stop_mim.sweeps.scales import SCALES, base_config
from stop_mim.training.build import build_objective
from stop_mim.training.config import TrainConfig

NAMES = ["positions", "covariance", "tokens", "resolution", "regularisation", "sigma", "convention", "masking"]


def overrides(name):
    return {variant.name: dict(variant.overrides) for variant in find_sweep(name).variants}


def values(name, field):
    return [variant.get(field) for variant in overrides(name).values()]


def test_all_sweeps_of_the_paper_are_there():
    assert list(SWEEPS) == NAMES
    with pytest.raises(InputError, match=f"There is no sweep 'sigmas': choose one of {', '.join(NAMES)}"):
        find_sweep("sigmas")


@pytest.mark.parametrize("name", NAMES)
def test_grids_are_well_formed(name):
    variants = overrides(name)
    assert find_sweep(name).baseline in variants
    assert len(variants) == len(find_sweep(name).variants) > 1
    # Every variant is something else, and names every field that any of them changes: none depends on the recipe alone.
    assert len({str(sorted(changes.items(), key=str)) for changes in variants.values()}) == len(variants)
    assert all("positions.kind" in changes for changes in variants.values())
    assert all(set(variant) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for variant in variants)


# At the larger scales, those whose grid may not fit: ranks of the covariance, and masks.
FITS = [(name, "demo") for name in NAMES]
FITS += [("covariance", "tiny-imagenet"), ("masking", "tiny-imagenet"), ("masking", "imagenet")]


@pytest.mark.parametrize(("name", "scale"), FITS)
def test_every_variant_fits_every_scale(name, scale):
    base = base_config(SCALES[scale], SweepConfig(scale=scale))
    sweep = find_sweep(name)
    Plan(name, scale, "", sweep.baseline, (), base, sweep.variants, Probe("scenes", "")).check()


def test_grids_ask_what_the_paper_asks():
    assert values("positions", "positions.kind") == ["sincos", "learned", "stochastic"]
    assert values("tokens", "positions.apply_to") == ["none", "context", "both", "masked"]
    assert values("resolution", "objective.target_resolution") == ["full", "bilinear", "max", "full"]
    strengths = values("regularisation", "objective.l1_strength")
    assert strengths[0] == strengths[-1] == 0
    assert len(strengths) >= 4
    assert set(values("regularisation", "positions.kind")[:-1]) == {"sincos"}
    sigmas = values("sigma", "positions.sigma")
    assert sigmas[0] == 0
    assert sigmas[-1] / sigmas[1] >= 1e4


def test_learned_and_fixed_covariance_are_compared_at_the_same_sigmas():
    grid = overrides("covariance").values()
    sigmas = {
        kind: [one["positions.sigma"] for one in grid if "positions.sigma" in one and _covariance(one) == kind]
        for kind in ("tied", "identity")
    }
    assert sigmas["tied"] == sigmas["identity"]
    assert (min(sigmas["tied"]), max(sigmas["tied"])) == (0.05, 1.0)
    assert {_covariance(one) for one in grid} >= {"untied", "diagonal", "low_rank(8)"}


def _covariance(changes):
    return changes.get("positions.covariance", "tied") if changes["positions.kind"] == "stochastic" else None


def test_the_conventions_are_also_compared_at_the_same_noise():
    base, power = base_config(SCALES["demo"], SweepConfig()), {}
    for variant in find_sweep("convention").variants:
        torch.manual_seed(0)
        positions = build_objective(with_overrides(base, variant.overrides)).positions
        power[variant.name] = positions.noise_power().item()
    assert power["paper-0.0625"] == pytest.approx(power["release"])
    assert power["paper"] == pytest.approx(4 * power["release"])
    assert power["sincos-paper"] == power["sincos-release"] == 0


def test_overrides_change_fields_by_their_path_and_nothing_else():
    before = TrainConfig()
    after = with_overrides(before, {"positions.sigma": 0.5, "seed": 3, "encoder.image_size": (64, 32)})
    assert (after.positions.sigma, after.seed, after.encoder.image_size) == (0.5, 3, (64, 32))
    assert with_overrides(after, {"positions.sigma": 0.25, "seed": 0, "encoder.image_size": (224, 224)}) == before
    assert with_overrides(before, {}) == before


@pytest.mark.parametrize("path", ["positions.sigmas", "position.sigma", "seed.x", "positions.sigma.x", ""])
def test_unknown_fields_are_refused(path):
    with pytest.raises(InputError, match=f"There is no field '{path}'"):
        with_overrides(TrainConfig(), {path: 1})


def test_values_that_a_field_refuses_are_refused():
    with pytest.raises(InputError, match=r"positions.sigma is -1"):
        with_overrides(TrainConfig(), {"positions.sigma": -1.0})


def test_the_epochs_of_each_scale_and_the_share_of_the_warm_up():
    for name, epochs in {"demo": 12, "tiny-imagenet": 20, "imagenet": 300}.items():
        config = base_config(SCALES[name], SweepConfig(scale=name))
        assert config.optim.epochs == epochs
        longer = base_config(SCALES[name], SweepConfig(scale=name, epochs=3 * epochs))
        assert longer.optim.epochs == 3 * epochs
        assert math.isclose(longer.optim.warmup_epochs, 3 * config.optim.warmup_epochs)
    with pytest.raises(InputError, match="epochs is 0: give a number above zero"):
        base_config(SCALES["demo"], SweepConfig(epochs=0))
