"""Named sweeps: the questions of the paper's ablations, as variants of one run. A variant is the fields that it changes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stop_mim.errors import InputError
from stop_mim.training.config import TrainConfig

COVARIANCE_SIGMAS = (0.05, 0.1, 0.25, 0.5, 1.0)
SIGMAS = (0.0, 0.001, 0.01, 0.1, 0.25, 1.0, 10.0)
L1_STRENGTHS = (1e-5, 1e-4, 1e-3)
LOW_RANKS = (8, 32)
# The variance of the noise that the released code draws with its sigma of 0.25, a standard deviation there.
RELEASED_VARIANCE = 0.25**2

FIXED: dict[str, Any] = {"positions.kind": "sincos"}
STOP: dict[str, Any] = {"positions.kind": "stochastic"}


@dataclass(frozen=True)
class Variant:
    """A run's name within its sweep, and the fields by which it differs from the others."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Variants, and the one that the others are compared with."""

    name: str
    summary: str
    baseline: str
    variants: tuple[Variant, ...]


SWEEPS: dict[str, Sweep] = {}


def sweep(name: str, summary: str, baseline: str, variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Make a grid known by its name."""
    SWEEPS[name] = Sweep(name, summary, baseline, tuple(Variant(*item) for item in variants.items()))


def find_sweep(name: str) -> Sweep:
    """The sweep of that name."""
    if name not in SWEEPS:
        raise InputError(f"There is no sweep '{name}': choose one of {', '.join(SWEEPS)}.")
    return SWEEPS[name]


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """The configuration with some fields changed, each named by its path, such as positions.sigma."""
    for path, value in overrides.items():
        config = _changed(config, path, path.split("."), value)
    return config


def _changed(config: Any, path: str, names: list[str], value: Any) -> Any:
    fields = {one.name for one in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    if names[0] not in fields:
        raise InputError(f"There is no field '{path}': 'stop-mim pretrain RECIPE --help' shows every field.")
    if len(names) > 1:
        value = _changed(getattr(config, names[0]), path, names[1:], value)
    return dataclasses.replace(config, **{names[0]: value})


sweep(
    "positions",
    "sine-cosine, learned and stochastic positions (table 6)",
    "sincos",
    {"sincos": FIXED, "learned": {"positions.kind": "learned"}, "stochastic": STOP},
)

sweep(
    "covariance",
    "learned against fixed covariance at several sigmas (figure 3), and other forms of a learned one",
    "none",
    {
        "none": FIXED,
        **{f"learned-{sigma:g}": {**STOP, "positions.sigma": sigma} for sigma in COVARIANCE_SIGMAS},
        **{
            f"fixed-{sigma:g}": {**STOP, "positions.covariance": "identity", "positions.sigma": sigma}
            for sigma in COVARIANCE_SIGMAS
        },
        "untied": {**STOP, "positions.covariance": "untied"},
        "diagonal": {**STOP, "positions.covariance": "diagonal"},
        **{f"low-rank-{rank}": {**STOP, "positions.covariance": f"low_rank({rank})"} for rank in LOW_RANKS},
    },
)

sweep(
    "tokens",
    "noise on no tokens, on context, on both, on masked tokens (table 7)",
    "none",
    {name: {**STOP, "positions.apply_to": name} for name in ("none", "context", "both", "masked")},
)

sweep(
    "resolution",
    "targets at full and at half resolution, with fixed positions, against StoP (table 8)",
    "full",
    {
        "full": {**FIXED, "objective.target_resolution": "full"},
        "bilinear": {**FIXED, "objective.target_resolution": "bilinear"},
        "max": {**FIXED, "objective.target_resolution": "max"},
        "stop": {**STOP, "objective.target_resolution": "full"},
    },
)

sweep(
    "regularisation",
    "l1 on A with fixed positions, at several strengths, against StoP (section 4.3)",
    "none",
    {
        "none": {**FIXED, "objective.l1_strength": 0.0},
        **{f"l1-{strength:g}": {**FIXED, "objective.l1_strength": strength} for strength in L1_STRENGTHS},
        "stop": {**STOP, "objective.l1_strength": 0.0},
    },
)

sweep(
    "sigma",
    "sigma over several orders of magnitude: |A|, |m̃| and the probes (figure 4)",
    "sigma-0",
    {f"sigma-{sigma:g}": {**STOP, "positions.sigma": sigma} for sigma in SIGMAS},
)

sweep(
    "convention",
    "the paper's convention and the release's, also with the release's variance in the paper's, and without noise",
    "paper",
    {
        "paper": {**STOP, "positions.convention": "paper"},
        "release": {**STOP, "positions.convention": "release"},
        "paper-0.0625": {**STOP, "positions.convention": "paper", "positions.sigma": RELEASED_VARIANCE},
        "sincos-paper": {**FIXED, "positions.convention": "paper"},
        "sincos-release": {**FIXED, "positions.convention": "release"},
    },
)

sweep(
    "masking",
    "corrected and released mask samplers, each with and without StoP",
    "corrected",
    {
        "corrected": {**STOP, "masks.compat": None},
        "released": {**STOP, "masks.compat": "release"},
        "sincos-corrected": {**FIXED, "masks.compat": None},
        "sincos-released": {**FIXED, "masks.compat": "release"},
    },
)
