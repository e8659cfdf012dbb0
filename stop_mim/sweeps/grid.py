"""Named sweeps: the paper's ablations as variants of one run. A variant is the config fields that it changes.

A new sweep is one function with the decorator `SWEEPS.register`; its docstring is its help.
"""

import dataclasses
import operator
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stop_mim.errors import InputError
from stop_mim.records import from_plain
from stop_mim.registry import Registry
from stop_mim.training.config import flat

Config = TypeVar("Config")
Overrides = Mapping[str, Any]
Axes = Mapping[str, Sequence[Any]]
"""Values of config fields, by path, whose combinations a sweep compares."""

COVARIANCE_SIGMAS = (0.05, 0.1, 0.25, 0.5, 1.0)
# A fixed covariance makes more noise at the same sigma: at these values, about as much as a learned one.
SMALL_SIGMAS = (0.001, 0.01)
SIGMAS = (0.0, 0.001, 0.01, 0.1, 0.25, 1.0, 10.0)
# StoP shrinks A to three quarters, a strength of 1 to a third (docs/experiments.md).
L1_STRENGTHS = (0.01, 0.1, 1.0)
LOW_RANKS = (8, 32)

FIXED: Overrides = {"positions.kind": "sincos"}
STOP: Overrides = {"positions.kind": "stochastic"}


@dataclass(frozen=True)
class Sweep:
    """Variants by name, and the one that the others are compared with."""

    baseline: str
    variants: Mapping[str, Overrides]


SWEEPS: Registry[Callable[[], Sweep]] = Registry("sweep")


@SWEEPS.register("positions")
def positions() -> Sweep:
    """Sine-cosine, learned and stochastic positions (table 6)."""
    return Sweep("sincos", {"sincos": FIXED, "learned": {"positions.kind": "learned"}, "stochastic": STOP})


@SWEEPS.register("covariance")
def covariance() -> Sweep:
    """Learned and fixed covariance at several sigmas (figure 3), and other forms of a learned one."""
    learned = {f"learned-{sigma:g}": {**STOP, "positions.sigma": sigma} for sigma in COVARIANCE_SIGMAS}
    fixed = {
        f"fixed-{sigma:g}": {**STOP, "positions.covariance": "identity", "positions.sigma": sigma}
        for sigma in (*SMALL_SIGMAS, *COVARIANCE_SIGMAS)
    }
    forms = {"untied": "untied", "diagonal": "diagonal"} | {
        f"low-rank-{rank}": f"low_rank({rank})" for rank in LOW_RANKS
    }
    others = {name: {**STOP, "positions.covariance": form} for name, form in forms.items()}
    return Sweep("none", {"none": FIXED, **learned, **fixed, **others})


@SWEEPS.register("tokens")
def tokens() -> Sweep:
    """Noise on no tokens, on context, on both, on masked tokens (table 7)."""
    names = ("none", "context", "both", "masked")
    return Sweep("none", {name: {**STOP, "positions.apply_to": name} for name in names})


@SWEEPS.register("resolution")
def resolution() -> Sweep:
    """Targets at full, and also at half resolution, with fixed positions, and StoP (table 8)."""
    names = ("full", "bilinear", "max")
    fixed = {name: {**FIXED, "objective.target_resolution": name} for name in names}
    return Sweep("full", {**fixed, "stop": {**STOP, "objective.target_resolution": "full"}})


@SWEEPS.register("regularisation")
def regularisation() -> Sweep:
    """An l1 penalty on A with fixed positions, at several strengths, and StoP (section 4.3)."""
    penalties = {f"l1-{strength:g}": {**FIXED, "objective.l1_strength": strength} for strength in L1_STRENGTHS}
    without = {"objective.l1_strength": 0.0}
    return Sweep("none", {"none": {**FIXED, **without}, **penalties, "stop": {**STOP, **without}})


@SWEEPS.register("sigma")
def sigma() -> Sweep:
    """Sigma over several orders of magnitude: |A|, |m̃| and the probes (figure 4)."""
    return Sweep("sigma-0", {f"sigma-{value:g}": {**STOP, "positions.sigma": value} for value in SIGMAS})


@SWEEPS.register("convention")
def convention() -> Sweep:
    """Sigma as a variance, as a standard deviation, and that with the release's masked token; the tokens without noise."""
    paper, release = {"positions.convention": "paper"}, {"positions.convention": "release"}
    return Sweep(
        "paper",
        {
            "paper": {**STOP, **paper},
            "std": {**STOP, "positions.convention": "std"},
            "release": {**STOP, **release},
            "sincos-paper": {**FIXED, **paper},
            "sincos-release": {**FIXED, **release},
        },
    )


@SWEEPS.register("masking")
def masking() -> Sweep:
    """Corrected and released mask samplers, each with and without StoP."""
    return Sweep(
        "corrected",
        {
            "corrected": {**STOP, "masks.compat": None},
            "released": {**STOP, "masks.compat": "release"},
            "sincos-corrected": {**FIXED, "masks.compat": None},
            "sincos-released": {**FIXED, "masks.compat": "release"},
        },
    )


@SWEEPS.register("vary")
def vary() -> Sweep:
    """The fields of --vary alone, every combination of their values."""
    return Sweep("", {"": {}})


def varied(sweep: Sweep, axes: Axes) -> Sweep:
    """Return each variant with each combination of values; the first value of every field is the baseline's.

    Raises InputError if the variants set one of the fields themselves, or if two of them have the same name.
    """
    names = short_names(axes)
    baseline, variants = sweep.baseline, dict(sweep.variants)
    for path, values in axes.items():
        if own := [variant for variant, overrides in variants.items() if path in overrides]:
            raise InputError(
                f"--vary has {path}, which the variant '{own[0]}' sets itself: vary it without this sweep."
            )
        baseline = _joined(baseline, names[path], values[0])
        more: dict[str, Overrides] = {}
        for variant, overrides in variants.items():
            for value in values:
                name = _joined(variant, names[path], value)
                if name in more:
                    raise InputError(
                        f"--vary {path}: {more[name][path]!r} and {value!r} make the same name, '{name}': give values that "
                        "differ in their first six digits, or in letters and digits."
                    )
                more[name] = {**overrides, path: value}
        variants = more
    return Sweep(baseline, variants)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the last parts of fields' paths, or the whole paths where these are the same."""
    last = {path: path.rpartition(".")[2] for path in paths}
    counts = Counter(last.values())
    return {path: name if counts[name] == 1 else path for path, name in last.items()}


def _joined(variant: str, name: str, value: Any) -> str:
    """Return the name of a variant with one more field, which is also the name of a directory."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "-".join(filter(None, [variant, name, re.sub(r"[^\w.+]+", "-", text).strip("-")]))


def with_overrides(config: Config, overrides: Overrides) -> Config:
    """Return a config with fields replaced, each named by its path, such as positions.sigma."""
    nested: dict[str, Any] = {}
    # In the order of their paths, a field comes before what would be its own fields.
    for path, value in sorted(flat(overrides), key=operator.itemgetter(0)):
        *groups, name = path.split(".")
        part = nested
        for group in groups:
            part = part.setdefault(group, {})
            if not isinstance(part, dict):
                raise InputError(
                    f"'{path}' and '{group}' are both given: '{group}' has no field '{name}'; leave one out."
                )
        part[name] = value
    return from_plain(type(config), nested, base=config)


def changes(config: Any, default: Any) -> dict[str, Any]:
    """Return the fields, by path, in which a config differs from another of the same type."""
    before = dict(flat(dataclasses.asdict(default)))
    return {path: value for path, value in flat(dataclasses.asdict(config)) if value != before[path]}


def is_switch(config: Any, path: str) -> bool:
    """Whether the option of a field takes no value: --GROUP.NAME turns it on, --GROUP.no-NAME off."""
    group, _, name = path.rpartition(".")
    owner = operator.attrgetter(group)(config) if group else config
    return typing.get_type_hints(type(owner))[name] is bool


def as_flags(overrides: Overrides, config: Any) -> list[str]:
    """Return the command-line options that set these fields of a config."""
    flags: list[str] = []
    for path, value in overrides.items():
        group, _, name = path.rpartition(".")
        switch = is_switch(config, path)
        name = f"no-{name}" if switch and not value else name
        flags.append(f"--{group}.{name}".replace("_", "-") if group else f"--{name}".replace("_", "-"))
        if not switch:
            flags += map(str, value if isinstance(value, tuple) else (value,))
    return flags
