"""Constraints declared on config fields are checked when a config is made; the error names field, value and remedy."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from stop_mim.constraints import ABOVE_ZERO, FRACTION_BELOW_ONE, Checked, Each, Interval, OnlyWith, check_effects
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.training.config import TrainConfig


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
