"""Constraints of config fields: declared in the field's annotation, checked when the config is made.

    lr: Annotated[float, ABOVE_ZERO] = 8e-4

A value that is None, where the annotation allows it, is not checked. A Literal is a constraint by itself.
"""

import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stop_mim.errors import InputError


@dataclass(frozen=True)
class Constraint:
    """A condition on one value, and what to do where it does not hold."""

    remedy: str
    condition: Callable[[Any], bool]

    def holds(self, value: Any) -> bool:
        """Return whether the value is allowed; one of a wrong type is not."""
        try:
            return self.condition(value)
        except (OverflowError, TypeError, ValueError):
            return False


def Number(
    remedy: str,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> Constraint:
    """A finite number within bounds."""
    return Constraint(
        remedy, lambda value: math.isfinite(value) and at_least <= value <= at_most and above < value < below
    )


ABOVE_ZERO = Number("give a number above 0", above=0)
# Larger values are mistakes, or attempts to fill the memory.
SIDE = Number("give a number from 1 to 16,384", at_least=1, at_most=2**14)
WIDTH = Number("give a number from 1 to 65,536", at_least=1, at_most=2**16)
DEPTH = Number("give a number from 1 to 1,000", at_least=1, at_most=1000)
COUNT = Number("give a number from 1 to 1,000,000,000", at_least=1, at_most=10**9)
# Records hold no larger integers.
SEED = Number("give a number above -2^63 and below 2^63", above=-(2**63), below=2**63)
AT_LEAST_ZERO = Number("give 0 or a positive number", at_least=0)
FRACTION = Number("give a number from 0 to 1", at_least=0, at_most=1)
FRACTION_BELOW_ONE = Number("give a number from 0 to below 1", at_least=0, below=1)
PERCENTAGE = Constraint(
    "give a percentage such as 5%", lambda value: value.endswith("%") and 0 <= float(value[:-1]) <= 100
)


def Each(constraint: Constraint) -> Constraint:
    """Every element of a tuple meets a constraint; the tuple is not empty."""
    remedy = f"{constraint.remedy}, for each element"
    return Constraint(remedy, lambda value: len(value) > 0 and all(map(constraint.holds, value)))


def Interval(at_most: float = math.inf) -> Constraint:
    """Two finite numbers above zero, the smaller one first."""
    bound = "" if math.isinf(at_most) else f" of at most {at_most:g}"
    remedy = f"give two numbers{bound} above 0, the smaller one first"

    def holds(value: Any) -> bool:
        low, high = value
        return 0 < low <= high <= at_most and math.isfinite(high)

    return Constraint(remedy, holds)


@dataclass(frozen=True)
class OnlyWith:
    """The field has an effect only where another field has one of some values.

    `field` is the other field's path from the outermost config, such as "objective.kind". `check_effects` refuses a value
    that is not the field's default where it would have no effect.
    """

    field: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class NotWith:
    """The field has no effect where another field has one of some values; see `OnlyWith`."""

    field: str
    values: tuple[object, ...]


class Checked:
    """Base of config dataclasses: checks the constraints of all fields when an instance is made.

    `class OptimConfig(Checked, group="optim")` names the group that errors put before a field's name. A subclass with
    conditions between fields defines `__post_init__`, calls this one first, and then `require`.
    """

    GROUP: ClassVar[str] = ""

    def __init_subclass__(cls, group: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if group is not None:
            cls.GROUP = group

    def __post_init__(self) -> None:
        for field, kind, extras in _fields(type(self)):
            name, value = field.name, getattr(self, field.name)
            if value is None and type(None) in typing.get_args(kind):
                continue
            choices = _choices(kind)
            self.require(name, not choices or value in choices, f"choose {' or '.join(map(str, choices))}")
            for constraint in extras:
                if isinstance(constraint, Constraint):
                    self.require(name, constraint.holds(value), constraint.remedy)

    def require(self, name: str, holds: bool, remedy: str) -> None:
        """Raise InputError, with the field's name and value and the remedy, unless the condition holds."""
        if not holds:
            path = f"{self.GROUP}.{name}" if self.GROUP else name
            raise InputError(f"{path} is {getattr(self, name)}: {remedy}.")


def check_effects(config: Any) -> None:
    """Raise InputError for a field without effect that is set; see `OnlyWith` and `NotWith`."""
    for path, value, default, condition in _effects(config, ""):
        other, wanted = operator.attrgetter(condition.field)(config), isinstance(condition, OnlyWith)
        if value != default and (other in condition.values) != wanted:
            values = " or ".join(map(str, condition.values))
            remedy = f"set {condition.field} to {values}" if wanted else f"change {condition.field}"
            # A recipe may have set it, so that leaving it out is no remedy.
            keep = "leave it out" if default is None else f"leave it at {default}"
            raise InputError(
                f"{path} is {value}, which has no effect because {condition.field} is {other}: {keep}, or {remedy}."
            )


def _effects(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, OnlyWith | NotWith]]:
    for field, _, extras in _fields(type(config)):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _effects(value, f"{path}.")
        for extra in extras:
            if isinstance(extra, OnlyWith | NotWith):
                yield path, value, field.default, extra


def _fields(config: type) -> Iterator[tuple[dataclasses.Field[Any], Any, tuple[Any, ...]]]:
    """Yield each field, its type, and what `Annotated` adds to it."""
    hints = typing.get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        extras = getattr(hint, "__metadata__", ())
        yield field, typing.get_args(hint)[0] if extras else hint, extras


def _choices(kind: Any) -> list[object]:
    """Return the values of a Literal, alone or in a union; the elements of a tuple are not checked here."""
    parts = () if typing.get_origin(kind) is tuple else typing.get_args(kind)
    literals = [part for part in (kind, *parts) if typing.get_origin(part) is Literal]
    return [choice for part in literals for choice in typing.get_args(part)]
