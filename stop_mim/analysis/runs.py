"""Runs opened to be looked at: what was asked for, what was measured, the model as it was saved last; and runs by groups."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stop_mim.data.image_source import digest
from stop_mim.errors import InputError
from stop_mim.evaluation.plan import CLEVR_LABELS
from stop_mim.evaluation.results import RESULTS_FILE, is_accuracy, read_results
from stop_mim.models.objective import Objective
from stop_mim.positions import Grid
from stop_mim.training.build import build_objective
from stop_mim.training.checkpoint import Checkpoint, read_checkpoint
from stop_mim.training.config import TrainConfig
from stop_mim.training.run_folder import RunFolder, read_metrics

# The paper's protocol first, then others with labels, then what was measured while training.
PREFERRED = ("low-shot/1%/top1", "low-shot/", "linear_sgd/top1", "linear/top1", "finetune", "knn/", "", "probe/linear")
# Fields of a configuration that change nothing of what is learned.
INCIDENTAL = {"out", "seed", "stop_after_steps"}
INCIDENTAL_GROUPS = ("speed.", "log.", "checkpoint.")
# Those that say what noise there is, and those that without any say nothing.
NOISE = {"positions.kind", "positions.sigma", "positions.covariance"}
NOISE_DETAILS = {f"positions.{name}" for name in ("sigma_start", "sigma_schedule", "apply_to", "conditioned")}

Key = TypeVar("Key")


@dataclass(frozen=True)
class RunRecords:
    """What a run's folder tells without its weights."""

    path: Path
    config: TrainConfig
    metrics: list[dict[str, float]]
    """The lines of metrics.jsonl, oldest first."""
    results: list[dict[str, Any]]
    """The evaluations of results.json, if there is one."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        (height, width), patch = self.config.encoder.image_size, self.config.encoder.patch_size
        return height // patch, width // patch

    @property
    def last_step(self) -> int:
        """The last step that was recorded."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def newest(self, name: str) -> float:
        """The newest value of a measurement."""
        values = [line[name] for line in self.metrics if name in line]
        if not values:
            raise InputError(
                f"The run {self.path} has no '{name}' in its metrics.jsonl: train it further, or leave it out."
            )
        return values[-1]

    def accuracies(self) -> dict[str, float]:
        """Top-1 accuracies in percent by what they are: those of results.json, then those of the probe of the training.

        A name has the label, the data and the protocol in it, so that the same name is the same measurement.
        """
        found = {}
        for evaluation in self.results:
            about = [evaluation[key] for key in ("label", "data") if evaluation.get(key) not in (None, "", "class")]
            about.append(f"protocol {digest([json.dumps(evaluation.get('protocol'), sort_keys=True)])}")
            for name, value in evaluation["metrics"].items():
                of_one_draw = name.startswith("low-shot/") and "@" in name
                if is_accuracy(name) and "top1" in name and not of_one_draw:
                    found[", ".join([name, *about])] = value
        probed = [line for line in self.metrics if "probe/linear_top1" in line]
        return found | {name: probed[-1][name] for name in ("probe/linear_top1", "probe/knn_top1") if probed}


@dataclass(frozen=True)
class AnalysedRun(RunRecords):
    """A run with the model of its newest checkpoint, in evaluation mode, on the CPU."""

    objective: Objective
    step: int
    """The step of the checkpoint."""


def read_records(path: str | Path) -> RunRecords:
    """What a folder tells of its run; a folder without one is an InputError."""
    path = Path(path)
    config = RunFolder(path).config()
    return RunRecords(path, config, read_metrics(path), read_results(path / RESULTS_FILE))


def open_run(path: str | Path) -> AnalysedRun:
    """The run of a folder, with its newest weights; one without checkpoints is an InputError."""
    records = read_records(path)
    newest = RunFolder(records.path).newest_checkpoint()
    if newest is None:
        raise InputError(f"The run {path} has no checkpoint: train it until it has saved one, or leave it out.")
    checkpoint = read_checkpoint(newest)
    objective = new_objective(records)
    load_weights(objective, checkpoint, newest)
    fields = {field.name: getattr(records, field.name) for field in dataclasses.fields(records)}
    return AnalysedRun(**fields, objective=objective, step=checkpoint.step)


def new_objective(records: RunRecords) -> Objective:
    """The run's model without its weights."""
    last = next((line for line in reversed(records.metrics) if line.get("epoch")), None)
    # Schedules of sigma are functions of the whole run's steps, which depend on how many images there were.
    total = 1 if last is None else round(last["step"] / last["epoch"] * records.config.optim.epochs)
    return build_objective(records.config, max(1, total)).eval()


def load_weights(objective: Objective, checkpoint: Checkpoint, path: Path) -> None:
    """Put a checkpoint's weights, and sigma as it was there, into a model."""
    weights = {name.removeprefix("model."): t for name, t in checkpoint.tensors.items() if name.startswith("model.")}
    try:
        objective.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"The checkpoint {path} does not fit its run's configuration ({reason}): restore it."
        ) from error
    objective.positions.set_step(max(0, checkpoint.step - 1))


def check_same_grid(runs: Sequence[RunRecords]) -> None:
    """Refuse to compare runs whose images are cut into different patches."""
    for run in runs[1:]:
        if run.grid != runs[0].grid:
            (rows, columns), (other_rows, other_columns) = runs[0].grid, run.grid
            raise InputError(
                f"{runs[0].path} has {rows}x{columns} patches and {run.path} has {other_rows}x{other_columns}: compare runs of "
                "one grid."
            )


@dataclass(frozen=True)
class Noise:
    """The noise of a run's positions, by the form of its covariance and by sigma; "none" and 0 where there is none."""

    form: str
    sigma: float


def noise_of(config: TrainConfig) -> Noise:
    """What noise a configuration asks for."""
    positions = config.positions
    if positions.kind == "jittered":
        return Noise("jittered", positions.jitter_scale)
    silent = positions.kind != "stochastic" or positions.sigma == 0 or positions.apply_to == "none"
    return Noise("none", 0.0) if silent else Noise(positions.covariance, positions.sigma)


def check_comparable(runs: Sequence[RunRecords], forms: Sequence[str] | None = None) -> None:
    """Refuse runs that differ in more than their noise and seed, that stand at different steps, or that are given twice.

    `forms` are the covariances that a comparison is about; not given: any. Fixed sine-cosine positions always belong to it.
    """
    check_same_grid(runs)
    # Two runs with noise are held to more than a run without any, which could be like either.
    first = next((run for run in runs if noise_of(run.config).form != "none"), runs[0])
    seen: dict[tuple[Noise, int], RunRecords] = {}
    for run in runs:
        noise, positions = noise_of(run.config), run.config.positions
        if positions.kind in ("learned", "jittered") or noise.form not in ("none", *(forms or [noise.form])):
            raise InputError(
                f"The run {run.path} has {positions.kind} positions with the covariance '{positions.covariance}', which this "
                "figure does not compare: leave it out."
            )
        if fields := _differences(first.config, run.config):
            raise InputError(
                f"{first.path} and {run.path} differ in {fields[0]}: compare runs that differ in their noise and seed alone."
            )
        if run.last_step != first.last_step:
            raise InputError(
                f"{first.path} stands at step {first.last_step} and {run.path} at step {run.last_step}: finish both, or "
                "leave one out."
            )
        same = seen.setdefault((noise, run.config.seed), run)
        if same is not run:
            raise InputError(f"{same.path} and {run.path} are the same run with the same seed: give it once.")


def _differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Fields in which two configurations differ, but for those that say what noise there is or change nothing."""
    silent = "none" in (noise_of(one).form, noise_of(other).form)
    free = INCIDENTAL | NOISE | (NOISE_DETAILS if silent else set())
    ours, theirs = dict(_flat(dataclasses.asdict(one))), dict(_flat(dataclasses.asdict(other)))
    differing = [name for name, value in ours.items() if theirs[name] != value and name not in free]
    return [name for name in differing if not name.startswith(INCIDENTAL_GROUPS)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def common_accuracy(runs: Sequence[RunRecords], score: str | None = None) -> str:
    """The name of an accuracy that all runs have: the one that is asked for, or the nearest to the paper's protocol."""
    names = [name for name in runs[0].accuracies() if all(name in run.accuracies() for run in runs)]
    if not names:
        lacking = next((run for run in runs if not run.accuracies()), runs[-1])
        raise InputError(
            f"The run {lacking.path} shares no top-1 accuracy with the others: evaluate all of them alike with 'stop-mim "
            "evaluate', or train them with probe.data."
        )
    asked = [name for name in names if score is None or score in (name, *_short_names(name))]
    if not asked:
        known = ", ".join(dict.fromkeys(_short_names(name)[-1] for name in names))
        raise InputError(f"The runs do not all have the score '{score}': choose one of {known}.")
    return min(asked, key=_preference)


def _short_names(name: str) -> list[str]:
    """What an accuracy may be called: linear/top1, or distance/linear/top1, as in a sweep's summary, where it has a label."""
    metric, *about = name.split(", ")
    return [metric, *(f"{label}/{metric}" for label in about[:1] if label in CLEVR_LABELS)]


def _preference(name: str) -> int:
    fits = [number for number, start in enumerate(PREFERRED) if start and name.startswith(start)]
    others = PREFERRED.index("probe/linear") + 1 if name.startswith("probe/") else PREFERRED.index("")
    return min(fits, default=others)


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    mean: float
    std: float
    """The standard deviation over seeds; nan where there is but one."""
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and (unbiased) standard deviation."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan, len(values))


def grouped(runs: Sequence[RunRecords], key: Callable[[RunRecords], Key]) -> dict[Key, list[RunRecords]]:
    """Runs by what they have in common, in the order in which the groups appear."""
    groups: dict[Key, list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def spreads_by_sigma(
    runs: Sequence[RunRecords], measure: Callable[[RunRecords], float]
) -> dict[str, dict[float, Spread]]:
    """A measurement over seeds, by the form of the noise and then by sigma, from the lowest."""
    groups = grouped(runs, lambda run: noise_of(run.config))
    found: dict[str, dict[float, Spread]] = {}
    for noise in sorted(groups, key=lambda noise: noise.sigma):
        found.setdefault(noise.form, {})[noise.sigma] = spread([measure(run) for run in groups[noise]])
    return found
