"""A sweep as it is to be run: its grid with every value that changes results, kept in OUT/sweep.json, and its jobs."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.seeds import seeded_generator
from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.grid import Variant, find_sweep, with_overrides
from stop_mim.sweeps.probe import Probe
from stop_mim.sweeps.scales import base_config, find_scale, probe_of, shown_scores
from stop_mim.training.build import build_masks
from stop_mim.training.config import (
    CheckpointConfig,
    LogConfig,
    MaskConfig,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
)
from stop_mim.training.distributed import Ranks
from stop_mim.training.feasibility import check_model, split_batch

PLAN_FILE = "sweep.json"
FORMAT = "stop-mim sweep 1"


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    variant: str
    seed: int
    recipe: str
    config: TrainConfig
    probe: Probe

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out or "")

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} seed {self.seed}"

    def to_line(self) -> str:
        """All of it on one line."""
        fields = {name: getattr(self, name) for name in ("variant", "seed", "recipe")}
        return json.dumps(
            {**fields, "config": json.loads(to_json(self.config)), "probe": dataclasses.asdict(self.probe)}
        )

    @staticmethod
    def from_line(line: str) -> "Job":
        """The job that `to_line` wrote."""
        plain = json.loads(line)
        config, probe = from_json(json.dumps(plain.pop("config"))), _probe_from(plain.pop("probe"))
        return Job(**plain, config=config, probe=probe)


@dataclass(frozen=True)
class Plan:
    """All that decides the results of a sweep, but for its seeds."""

    sweep: str
    scale: str
    recipe: str
    baseline: str
    shown: tuple[str, ...]
    base: TrainConfig
    variants: tuple[Variant, ...]
    probe: Probe

    def names(self) -> list[str]:
        """The variants by name."""
        return [variant.name for variant in self.variants]

    def variant(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def jobs(self, out: Path, seeds: Iterable[int], variants: Iterable[str] = ()) -> Iterator[Job]:
        """A job for each seed and variant: seed by seed, so that a sweep that is stopped has whole seeds."""
        chosen = set(variants) or set(self.names())
        for seed in seeds:
            for variant in self.variants:
                if variant.name in chosen:
                    config = with_overrides(self.base, variant.overrides)
                    folder = run_folder(out, variant.name, seed)
                    yield Job(variant.name, seed, self.recipe, replace(config, seed=seed, out=str(folder)), self.probe)

    def check(self) -> None:
        """Refuse a variant that could not run, whatever the data are."""
        sampled: set[MaskConfig] = set()
        for variant in self.variants:
            try:
                config = with_overrides(self.base, variant.overrides)
                split_batch(config, Ranks(0, 1, 1, torch.device("cpu")))
                grid = check_model(config).grid
                if config.masks not in sampled:
                    sampled.add(config.masks)
                    # The released sampler finds out what it cannot do only when it samples.
                    masks = build_masks(config.masks, grid)
                    masks.sample(min(16, config.optim.batch_size), "cpu", seeded_generator("cpu", 0, "masks"))
            except InputError as error:
                raise InputError(f"The variant '{variant.name}' cannot run: {error}") from error


def run_folder(out: Path, variant: str, seed: int) -> Path:
    """Where a run of a sweep lies."""
    return out / variant / f"seed-{seed}"


def make_plan(name: str, config: SweepConfig) -> Plan:
    """The plan of a named sweep; what cannot work is refused."""
    sweep, scale = find_sweep(name), find_scale(config.scale)
    variants = [variant.name for variant in sweep.variants]
    _check_seeds(config.seeds)
    for given in [*config.variants, *([config.baseline] if config.baseline else [])]:
        if given not in variants:
            raise InputError(f"The sweep '{name}' has no variant '{given}': choose one of {', '.join(variants)}.")
    if config.side_by_side is not None and config.side_by_side < 1:
        raise InputError(f"side_by_side is {config.side_by_side}: give a number above zero, or leave it out.")
    base, probe = base_config(scale, config), probe_of(scale, config)
    if not base.data and not config.dry_run:
        raise InputError(f"The scale {scale.name} has no images of its own: add --data with the name of a data set.")
    plan = Plan(
        name,
        scale.name,
        scale.recipe,
        config.baseline or sweep.baseline,
        shown_scores(scale, probe),
        base,
        sweep.variants,
        probe,
    )
    plan.check()
    return plan


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise InputError("seeds is empty: give at least one seed.")
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise InputError(f"seeds has {twice[0]} twice: give every seed once.")
    if min(seeds) < 0:
        raise InputError(f"seeds has {min(seeds)}: give numbers that are zero or positive.")


def out_folder(name: str, config: SweepConfig) -> Path:
    """The folder that was asked for, or the same one for every sweep of that name and scale."""
    return config.out or Path("runs") / f"sweep-{name}-{config.scale}"


def write_plan(out: Path, plan: Plan) -> None:
    """Keep the plan in the folder of its runs."""
    document = {"format": FORMAT, **_plain(plan)}
    write_atomically(out / PLAN_FILE, lambda file: file.write_text(json.dumps(document, indent=2) + "\n"))


def read_plan(out: Path) -> Plan:
    """The plan of the sweep in a folder."""
    file = out / PLAN_FILE
    if not file.exists():
        raise InputError(f"{out} holds no sweep (no {PLAN_FILE}): name the folder of a sweep.")
    try:
        plain = json.loads(file.read_text())
        if plain.pop("format") != FORMAT:
            raise ValueError("another format")
        base = from_json(json.dumps(plain.pop("base")))
        variants = tuple(Variant(name, _tuples(overrides)) for name, overrides in plain.pop("variants").items())
        shown, probe = tuple(plain.pop("shown")), _probe_from(plain.pop("probe"))
        return Plan(**plain, shown=shown, base=base, variants=variants, probe=probe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} cannot be read ({error}): restore it, or choose another --out.") from error


def require_same_plan(out: Path, plan: Plan) -> None:
    """Refuse a folder that holds something else than this sweep, begun or not."""
    if not out.exists():
        return
    if not out.is_dir() or (not (out / PLAN_FILE).exists() and any(_visible(out))):
        raise InputError(f"{out} exists and is not the folder of a sweep: choose another --out.")
    if not (out / PLAN_FILE).exists():
        return
    before, now = _flat(_plain(_settled(read_plan(out)))), _flat(_plain(_settled(plan)))
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            raise InputError(
                f"{out} holds another sweep ('{before['sweep']}' at the scale {before['scale']}; {name} was "
                f"{before.get(name)} there and is {now.get(name)} now): choose another --out."
            )


def _visible(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if not path.name.startswith("."))


def _settled(plan: Plan) -> Plan:
    """Without what changes no result."""
    base = replace(plan.base, speed=SpeedConfig(), log=LogConfig(), checkpoint=CheckpointConfig())
    return replace(plan, base=base, baseline="", shown=())


def _plain(plan: Plan) -> dict[str, Any]:
    plain = dataclasses.asdict(plan)
    plain["variants"] = {variant.name: dict(variant.overrides) for variant in plan.variants}
    return plain


def _flat(plain: Any, path: str = "") -> dict[str, Any]:
    """Nested values by dotted names, tuples and lists alike."""
    if isinstance(plain, Mapping):
        parts = (_flat(value, f"{path}.{name}" if path else name) for name, value in plain.items())
        return {name: value for part in parts for name, value in part.items()}
    return {path: list(plain) if isinstance(plain, tuple) else plain}


def _tuples(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in overrides.items()}


def _probe_from(plain: Mapping[str, Any]) -> Probe:
    return Probe(**_tuples(plain))
