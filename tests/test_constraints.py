"""Constraints declared on config fields are checked when a config is made; the error names field, value and remedy."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from stop_mim.constraints import ABOVE_ZERO, FRACTION_BELOW_ONE, Checked, Each, Interval, OnlyWith, check_effects
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.sweeps.grid import with_overrides
from stop_mim.training.config import TrainConfig
from stop_mim.training.recipes import find_recipe


@dataclass(frozen=True)
class Inner(Checked, group="inner"):
    kind: Literal["a", "b"] = "a"
    size: Annotated[int | None, ABOVE_ZERO] = None
    rates: Annotated[tuple[float, ...], Each(FRACTION_BELOW_ONE)] = (0.5,)
    scale: Annotated[tuple[float, float], Interval(at_most=1)] = (0.1, 1.0)
    extra: Annotated[float, OnlyWith("inner.kind", ("b",))] = 0.0


@dataclass(frozen=True)
class Outer(Checked):
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "c"}, r"inner\.kind is c"),
        ({"size": 0}, r"inner\.size is 0"),
        ({"size": float("nan")}, r"inner\.size is nan"),
        ({"size": "many"}, r"inner\.size is many"),
        ({"size": 10**400}, r"inner\.size is 1000"),
        ({"rates": ()}, r"inner\.rates is \(\)"),
        ({"rates": (0.1, 1.0)}, r"inner\.rates"),
        ({"scale": (1.0, 0.5)}, r"inner\.scale is \(1.0, 0.5\)"),
        ({"scale": (0.5, 2.0)}, "at most 1"),
    ],
)
def test_a_value_outside_its_constraint_is_refused(given, named):
    with pytest.raises(InputError, match=named):
        Inner(**given)


@pytest.mark.parametrize("config", [EvaluateConfig, TrainConfig])
def test_a_seed_that_records_cannot_hold_is_refused(config):
    assert [config(seed=seed).seed for seed in (-1, 2**63 - 1)] == [-1, 2**63 - 1]
    for seed in (2**63, -(2**63), 10**400):
        with pytest.raises(InputError, match=rf"seed is {str(seed)[:9]}.*: give a number above -2\^63 and below 2\^63"):
            config(seed=seed)


def test_values_within_their_constraints_are_taken():
    Inner(kind="b", size=3, rates=(0.0, 0.9), scale=(0.5, 0.5), extra=1.0)


def test_a_field_without_effect_is_refused():
    check_effects(Outer(Inner(kind="b", extra=1.0)))
    with pytest.raises(InputError, match=r"inner\.extra is 1\.0.*inner\.kind is a"):
        check_effects(Outer(Inner(extra=1.0)))


@pytest.mark.parametrize(
    ("recipe", "field", "value", "default"),
    [
        ("stop-vitb16", "masks.mask_ratio", 0.9, "0.75"),
        ("mae-vitb16", "masks.n_blocks", 9, "4"),
        ("mae-vitb16", "masks.target_scale", (0.1, 0.2), "(0.15, 0.2)"),
        ("data2vec-vitb16", "masks.context_scale", (0.5, 0.6), "(0.85, 1.0)"),
        ("mae-vitb16", "objective.beta", 5.0, "1.0"),
        ("stop-vitb16", "objective.norm_pixels", False, "True"),
    ],
)
def test_options_of_other_objectives_and_masks_are_refused(recipe, field, value, default):
    config = find_recipe(recipe)
    check_effects(config)
    remedy = rf"which has no effect because .*: leave it at {re.escape(default)}, or change"
    with pytest.raises(InputError, match=rf"{re.escape(field)} is .*, {remedy}"):
        check_effects(with_overrides(config, {field: value}))


def test_a_value_of_the_recipe_that_loses_its_effect_has_a_remedy_too():
    config = with_overrides(find_recipe("data2vec-vitb16"), {"masks.kind": "multiblock"})
    with pytest.raises(InputError, match=r"masks\.mask_ratio is 0\.61, .*: leave it at 0\.75, or change masks\.kind"):
        check_effects(config)
    check_effects(with_overrides(config, {"masks.mask_ratio": 0.75}))


def test_released_masks_have_no_chosen_numbers_of_tokens():
    config = with_overrides(find_recipe("stop-vitb16", "release"), {"masks.context_tokens": 20})
    with pytest.raises(InputError, match=r"masks\.context_tokens is 20.*masks\.compat is release"):
        check_effects(config)
