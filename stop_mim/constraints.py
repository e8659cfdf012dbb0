"""Constraints of config fields: declared in the field's annotation, checked when the config is made.

    lr: Annotated[float, ABOVE_ZERO] = 8e-4

A value that is None, where the annotation allows it, is not checked. A Literal is a constraint by itself.
"""

import dataclasses
import math
import operator
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from stop_mim.errors import InputError


@runtime_checkable
class Constraint(Protocol):
    """A condition on one value, and what to do where it does not hold."""

    remedy: str

    def holds(self, value: Any) -> bool:
        """Whether the value is allowed."""
        ...


@dataclass(frozen=True)
class Number:
    """A finite number within bounds."""

    remedy: str
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def holds(self, value: Any) -> bool:
        inside = self.at_least <= value <= self.at_most and self.above < value < self.below
        return math.isfinite(value) and inside


ABOVE_ZERO = Number("give a number above 0", above=0)
# More is a mistake, or somebody who wants to fill the memory.
SIDE = Number("give a number from 1 to 16,384", at_least=1, at_most=2**14)
WIDTH = Number("give a number from 1 to 65,536", at_least=1, at_most=2**16)
DEPTH = Number("give a number from 1 to 1,000", at_least=1, at_most=1000)
COUNT = Number("give a number from 1 to 1,000,000,000", at_least=1, at_most=10**9)
AT_LEAST_ZERO = Number("give 0 or a positive number", at_least=0)
FRACTION = Number("give a number from 0 to 1", at_least=0, at_most=1)
FRACTION_BELOW_ONE = Number("give a number from 0 to below 1", at_least=0, below=1)


class Percentage:
    """A text such as 5%, from 0% to 100%."""

    remedy = "give a percentage such as 5%"

    def holds(self, value: Any) -> bool:
        return value.endswith("%") and 0 <= float(value[:-1]) <= 100


@dataclass(frozen=True)
class Each:
    """Every element of a tuple meets a constraint; the tuple is not empty."""

    constraint: Constraint

    @property
    def remedy(self) -> str:
        return f"{self.constraint.remedy}, for each element"

    def holds(self, value: Any) -> bool:
        return len(value) > 0 and all(self.constraint.holds(element) for element in value)


@dataclass(frozen=True)
class Interval:
    """Two finite numbers above zero, the smaller one first."""

    at_most: float = math.inf

    @property
    def remedy(self) -> str:
        bound = "" if math.isinf(self.at_most) else f" of at most {self.at_most:g}"
        return f"give two numbers{bound} above 0, the smaller one first"

    def holds(self, value: Any) -> bool:
        low, high = value
        return 0 < low <= high <= self.at_most and math.isfinite(high)


@dataclass(frozen=True)
class OnlyWith:
    """The field has an effect only where another field has one of some values.

    `field` is the other field's path from the outermost config, such as "objective.kind". `check_effects` refuses a value
    that is not the field's default where it would have no effect.
    """

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
        for name, kind, constraints in _constraints(type(self)):
            value = getattr(self, name)
            if value is None and _is_optional(kind):
                continue
            choices = _choices(kind)
            self.require(name, not choices or value in choices, f"choose {' or '.join(map(str, choices))}")
            for constraint in constraints:
                self.require(name, _holds(constraint, value), constraint.remedy)

    def require(self, name: str, holds: bool, remedy: str) -> None:
        """Raise InputError, with the field's name and value and the remedy, unless the condition holds."""
        if not holds:
            path = f"{self.GROUP}.{name}" if self.GROUP else name
            raise InputError(f"{path} is {getattr(self, name)}: {remedy}.")


def check_effects(config: Any) -> None:
    """Raise InputError for a field that is set and has no effect because of another field's value (see `OnlyWith`)."""
    for path, value, default, only_with in _effects(config, ""):
        other = operator.attrgetter(only_with.field)(config)
        if value != default and other not in only_with.values:
            raise InputError(
                f"{path} is {value}, which has no effect because {only_with.field} is {other}: leave it out, or set "
                f"{only_with.field} to {' or '.join(map(str, only_with.values))}."
            )


def _effects(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any, OnlyWith]]:
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _effects(value, f"{prefix}{field.name}.")
        for extra in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(extra, OnlyWith):
                yield f"{prefix}{field.name}", value, field.default, extra


def _holds(constraint: Constraint, value: Any) -> bool:
    try:
        return constraint.holds(value)
    except (TypeError, ValueError):
        return False


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _constraints(kind: type) -> list[tuple[str, Any, list[Constraint]]]:
    hints = _hints(kind)
    return [
        (
            field.name,
            hints[field.name],
            [extra for extra in getattr(hints[field.name], "__metadata__", ()) if isinstance(extra, Constraint)],
        )
        for field in dataclasses.fields(kind)
    ]


def _plain(kind: Any) -> Any:
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _is_optional(kind: Any) -> bool:
    return type(None) in typing.get_args(_plain(kind))


def _choices(kind: Any) -> list[object]:
    plain = _plain(kind)
    # The elements of a tuple are checked by whoever reads them.
    parts = () if typing.get_origin(plain) is tuple else typing.get_args(plain)
    literals = [part for part in (plain, *parts) if typing.get_origin(part) is Literal]
    return [choice for part in literals for choice in typing.get_args(part)]
