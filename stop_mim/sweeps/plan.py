"""The plan of a sweep: its runs as ordinary commands, and OUT/sweep.json, which keeps what their results depend on."""

import json
import re
import zlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from stop_mim.constraints import ABOVE_ZERO, Checked, Each, Number, check_effects
from stop_mim.errors import InputError
from stop_mim.launch import LaunchConfig
from stop_mim.options import Compat
from stop_mim.records import from_plain, read_record, write_json
from stop_mim.sweeps.grid import SWEEPS, Axes, Overrides, as_flags, changes, short_names, varied, with_overrides
from stop_mim.sweeps.scales import SCALES
from stop_mim.training.config import DeviceConfig, TrainConfig
from stop_mim.training.derived import following
from stop_mim.training.recipes import find_recipe

PLAN_FILE, SCORES_FILE = "sweep.json", "scores.json"
FORMAT = "stop-mim sweep 2"
# How the probes of --transfer are fitted.
TRANSFER_PROBE = ("--task", "linear", "--linear.standardise", "True", "--linear.layers", "1")
# The names of runs' directories have the seeds.
SEED_FROM_ZERO = Number("give a number from 0 to below 2^63", at_least=0, below=2**63)
# Groups of fields that do not change results.
WITHOUT_EFFECT = ("speed.", "log.", "checkpoint.")


@dataclass(frozen=True)
class SweepConfig(Checked):
    """Run a grid of variants over seeds and compare them. The same command continues where an earlier one stopped.

    Other options, such as --optim.lr 1e-3 or --speed.device cpu, go to `pretrain`; those of device and loading also to
    `evaluate`.
    """

    scale: str = "demo"
    """demo: synthetic scenes, minutes on two cores; tiny-imagenet: ViT-S/8, 54 epochs; imagenet: ViT-B/16, 300 epochs."""
    recipe: str | None = None
    """Recipe that the runs vary instead of the scale's, such as mae-tiny-imagenet."""
    compat: Compat = "corrected"
    """Train as the recipe does, as the released code (release), or as the paper's text (paper-text)."""
    data: str = ""
    """Training images; the demo scale has its own."""
    probe_data: str | None = None
    """Labelled images for the probes; default: the training images."""
    test_data: str | None = None
    """Test images of the probes; default: the test split of the labelled images, or a fifth of them."""
    low_shot_list: Path | None = None
    """Text file with the names of the few labelled images (imagenet: the published 1%); default: drawn at random."""
    transfer: tuple[str, ...] = ()
    """Other labelled data for a linear probe of every run, each as NAME=DATA, such as scenes=scenes:count=8000,size=64."""
    seeds: Annotated[tuple[int, ...], Each(SEED_FROM_ZERO)] = (0, 1, 2)
    """Seeds of each variant; use at least three to compare variants."""
    variants: tuple[str, ...] = ()
    """Variants to run; default: all."""
    baseline: str | None = None
    """Variant that the others are compared with; default: the sweep's."""
    epochs: Annotated[int | None, ABOVE_ZERO] = None
    """Epochs of every run instead of the scale's; the warm-up keeps its fraction."""
    out: Path | None = None
    """Directory of all runs and of the summary; default: runs/sweep-NAME-SCALE, with varied fields, recipe and compat."""
    side_by_side: Annotated[int, ABOVE_ZERO] = 1
    """Runs at the same time on each GPU, or on the CPU."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    dry_run: bool = False
    """Print the grid, the commands and the time they take, from finished runs or a few measured steps; train nothing."""
    retry_failed: bool = False
    """Run again what failed before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seeds", len({*self.seeds}) == len(self.seeds), "give every seed once")
        named = all(re.fullmatch(r"[\w-]+=.+", text) for text in self.transfer)
        self.require(
            "transfer",
            named and len(self.transfers) == len(self.transfer),
            "give NAME=DATA, with letters, digits, - and _ in NAME, each NAME once",
        )

    @property
    def transfers(self) -> dict[str, str]:
        """The data of --transfer by name."""
        return {name: data for name, _, data in (text.partition("=") for text in self.transfer)}


class Probe(NamedTuple):
    """How each run is evaluated: the file of the scores, the options of `evaluate`, and how names of scores begin."""

    file: str
    options: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Job:
    """One run of a sweep: a training, then evaluations, each as the arguments of an ordinary command."""

    variant: str
    seed: int
    folder: Path
    pretrain: tuple[str, ...]
    resume: tuple[str, ...]
    evaluations: dict[str, tuple[str, ...]]
    """By the file in the run's directory that holds the scores."""

    @property
    def name(self) -> str:
        """The run's directory within the sweep's."""
        return f"{self.variant}/seed-{self.seed}"

    @property
    def evaluated(self) -> bool:
        """Whether the run has any scores, and so needs no more training."""
        return any((self.folder / file).exists() for file in self.evaluations)

    @property
    def finished(self) -> bool:
        """Whether the run is trained and has all scores."""
        return all((self.folder / file).exists() for file in self.evaluations)

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The commands that are left, in order."""
        left = [command for file, command in self.evaluations.items() if not (self.folder / file).exists()]
        return left if self.evaluated else [self.training, *left]

    @property
    def training(self) -> tuple[str, ...]:
        """The command that starts the training, or continues it."""
        return self.resume if (self.folder / "config.json").exists() else self.pretrain


@dataclass(frozen=True)
class Plan:
    """A sweep with all settings of its runs."""

    sweep: str
    options: SweepConfig
    recipe: str
    baseline: str
    variants: dict[str, Overrides]
    base: TrainConfig
    """The config that the variants change."""
    evaluate: tuple[str, ...]
    shown: tuple[str, ...]
    """Scores that the tables show."""
    out: Path

    def config(self, variant: str) -> TrainConfig:
        """Return the config of a variant, with the recipe's seed and directory."""
        return with_overrides(self.base, self.variants[variant])

    @property
    def labelled_data(self) -> str:
        """The images of the scale's evaluation."""
        return self.evaluate[self.evaluate.index("--data") + 1]

    @cached_property
    def probes(self) -> list[Probe]:
        """The scale's evaluation, then those on the data of --transfer."""
        found = [Probe(SCORES_FILE, self.evaluate)]
        for name, data in self.options.transfers.items():
            # Scores on other data of the same name are not taken for these.
            file = f"scores-{name}-{zlib.crc32(data.encode()):08x}.json"
            found.append(Probe(file, (*TRANSFER_PROBE, "--data", data), f"{name}/"))
        return found

    @cached_property
    def jobs(self) -> list[Job]:
        """The runs that are asked for, seed by seed, so that a sweep that is stopped has complete seeds."""
        return [self._job(variant, seed) for seed in self.options.seeds for variant in self.chosen]

    @property
    def chosen(self) -> list[str]:
        """The variants that are asked for, each once."""
        return list(dict.fromkeys(self.options.variants or self.variants))

    def _job(self, variant: str, seed: int) -> Job:
        folder, default = self.out / variant / f"seed-{seed}", find_recipe(self.recipe, self.options.compat)
        run = replace(self.config(variant), seed=seed, out=str(folder))
        changed = changes(run, default)
        # The recipe's warm-up is given too where it would follow the epochs.
        changed |= changes(run, following(default, changed))
        speed = {path: value for path, value in changed.items() if path.startswith("speed.")}
        known = {f"speed.{one.name}" for one in fields(DeviceConfig)}
        device = as_flags({path: value for path, value in speed.items() if path in known}, run)
        files = ("--untrained", "no", "--json")
        return Job(
            variant,
            seed,
            folder,
            pretrain=("pretrain", self.recipe, *compat_flag(self.options), *as_flags(changed, run)),
            resume=("resume", str(folder), *as_flags(speed, run)),
            evaluations={
                probe.file: ("evaluate", str(folder), *probe.options, *device, *files, str(folder / probe.file))
                for probe in self.probes
            },
        )

    def document(self) -> dict[str, Any]:
        """Return what results depend on, as JSON values."""
        changed = changes(self.base, find_recipe(self.recipe))
        document = {
            "format": FORMAT,
            "sweep": self.sweep,
            "scale": self.options.scale,
            "recipe": self.recipe,
            "config": {path: value for path, value in changed.items() if not path.startswith(WITHOUT_EFFECT)},
            "evaluate": self.evaluate,
            "variants": self.variants,
        }
        return json.loads(json.dumps(document))

    def keep(self) -> None:
        """Write OUT/sweep.json; variants of earlier commands stay in it."""
        now = self.document()
        write_json(self.out / PLAN_FILE, now | {"variants": self._before().get("variants", {}) | now["variants"]})

    def check(self) -> None:
        """Raise InputError if the directory holds something else than this sweep; a sweep may get more variants."""
        before, now = self._before(), self.document()
        if not before and self.out.exists() and any(not path.name.startswith(".") for path in self.out.iterdir()):
            raise InputError(f"{self.out} exists and is not the directory of a sweep: choose another --out.")
        known = from_plain(dict[str, Any], before.pop("variants", {}), "variants")
        pairs = {name: (was, now.get(name)) for name, was in before.items()}
        pairs |= {f"variant {name}": (was, now["variants"].get(name, was)) for name, was in known.items()}
        for name, (was, is_now) in pairs.items():
            if was != is_now:
                raise InputError(
                    f"{self.out} holds a sweep with other settings ({name} was {was} and is {is_now} now): choose another "
                    "--out."
                )

    def _before(self) -> dict[str, Any]:
        """Return what the directory's sweep.json has; nothing if there is none."""
        file = self.out / PLAN_FILE
        return read_record(file, dict[str, Any], "restore it, or choose another --out") if file.exists() else {}


def runs_by_seed(folder: Path) -> dict[int, Path]:
    """Return the runs in the directory of a variant, in the order of their seeds; a copy such as seed-0.old is not one."""
    found = {int(name[1]): run for run in folder.glob("seed-*") if (name := re.fullmatch(r"seed-(\d+)", run.name))}
    return dict(sorted(found.items()))


def base_config(config: SweepConfig) -> TrainConfig:
    """Return the config of a scale's runs, before the options of the command line."""
    scale = SCALES.find(config.scale)()
    base = with_overrides(find_recipe(config.recipe or scale.recipe, config.compat), scale.overrides)
    if config.data:
        base = replace(base, data=config.data)
    if config.epochs is not None:
        base = following(base, {"optim.epochs": config.epochs})
    return base


def compat_flag(config: SweepConfig) -> list[str]:
    """Return the option of `pretrain` that a sweep's compat is; none for its default."""
    return [] if config.compat == "corrected" else ["--compat", config.compat]


def make_plan(
    name: str, config: SweepConfig, base: TrainConfig | None = None, axes: Axes = MappingProxyType({})
) -> Plan:
    """Return the plan of a named sweep; raise InputError if it cannot run.

    Args:
        base: config that the variants change; default: the scale's.
        axes: values of fields with each combination of which every variant is run.
    """
    sweep, scale = varied(SWEEPS.find(name)(), axes), SCALES.find(config.scale)()
    if not sweep.baseline:
        raise InputError("No field is varied: add --vary FIELD VALUE VALUE, such as --vary optim.lr 5e-4 1e-3.")
    base = base or base_config(config)
    for given in [*config.variants, *filter(None, [config.baseline])]:
        if given not in sweep.variants:
            raise InputError(f"The sweep '{name}' has no variant '{given}': choose from {', '.join(sweep.variants)}.")
    if not base.data and not config.dry_run:
        raise InputError(f"The scale {config.scale} has no images: add --data with the name of a dataset.")
    for variant, overrides in sweep.variants.items():
        try:
            check_effects(with_overrides(base, overrides))
        except InputError as error:
            raise InputError(f"The variant '{variant}' cannot run: {error}") from error
    parts = ["sweep", name, *short_names(axes).values(), config.recipe or config.scale, *compat_flag(config)[1:]]
    return Plan(
        name,
        config,
        config.recipe or scale.recipe,
        config.baseline or sweep.baseline,
        dict(sweep.variants),
        base,
        (*scale.evaluate, *_probes(config, scale.evaluate, base.data)),
        scale.shown,
        config.out or Path("runs") / "-".join(parts),
    )


def _probes(config: SweepConfig, evaluate: tuple[str, ...], data: str) -> list[str]:
    """Return the options of `evaluate` that name the user's labelled images."""
    given = {"--test-data": config.test_data, "--low-shot.list-file": config.low_shot_list}
    named = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    if "--data" not in evaluate:
        return ["--data", config.probe_data or data, *named]
    if config.probe_data or named:
        raise InputError(
            f"The scale {config.scale} has its own labelled images: leave out --probe-data, --test-data and --low-shot-list."
        )
    return []
