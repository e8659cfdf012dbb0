"""Runs opened for analysis: config, status, metrics, scores and newest weights; and runs compared in groups."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from stop_mim.errors import InputError
from stop_mim.exchange.loading import objective_of
from stop_mim.models.objective import Objective
from stop_mim.positions import Grid
from stop_mim.records import from_plain, read_record
from stop_mim.results import RESULTS_FILE, Evaluation, Measurement, Score, find_score, read_results
from stop_mim.sweeps.grid import changes
from stop_mim.sweeps.plan import PLAN_FILE, SCORES_FILE, WITHOUT_EFFECT, runs_by_seed
from stop_mim.sweeps.summary import Spread, spread
from stop_mim.training.config import TrainConfig
from stop_mim.training.run_folder import RunFolder, read_metrics

# Tasks in the order in which figures prefer them: the paper's protocol first. Scores measured while training come last.
PREFERRED_TASKS = ("low-shot", "linear-sgd", "linear", "finetune", "finetune-low-shot", "knn")
PAPERS_AMOUNT = "1%"
# Scores of the online probe: their keys in metrics.jsonl, and titles.
ONLINE = {"probe/linear_top1": "Online linear probe", "probe/knn_top1": "Online kNN probe"}
# Config fields that do not change what is learned.
INCIDENTAL = {"out", "seed", "stop_after_steps"}
# Fields that describe the noise, and those without meaning where there is none.
NOISE = {"positions.kind", "positions.sigma", "positions.covariance"}
NOISE_DETAILS = {"positions.apply_to"}

Key = TypeVar("Key")


@dataclass(frozen=True)
class Status:
    """How far a run has come, as its status.json says; "unknown" for a run without that file."""

    state: Literal["running", "stopped", "finished", "failed", "unknown"] = "unknown"
    step: int = 0
    total_steps: int | None = None
    message: str = ""
    updated: str = ""


@dataclass(frozen=True)
class ScoreKey:
    """What a score measures: equal keys are scores that were measured in the same way."""

    name: str
    """As `figure --score` takes it, such as low-shot/1%/top1."""
    title: str
    """Label in figures, such as "low-shot, 1%"; without the metric for top-1 accuracies."""
    data: str = ""
    measurement: Measurement = ()
    rank: int | None = len(PREFERRED_TASKS) + 2
    """Place in the order of preference, lowest first; None: only if asked for."""


def score_key(evaluation: Evaluation, score: Score) -> ScoreKey:
    """Return the key of a score of an evaluation."""
    rank = [*PREFERRED_TASKS, evaluation.task].index(evaluation.task) + 1
    if rank == 1 and score.variant.get("amount") == PAPERS_AMOUNT:
        rank = 0
    default = score.metric == "top1" and score.headline
    measurement = (*evaluation.measurement(), ("score", score.name))
    *parts, metric = evaluation.parts_of(score)
    title = ", ".join(parts if metric == "top1" else [*parts, metric])
    return ScoreKey(evaluation.name_of(score), title, evaluation.data, measurement, rank if default else None)


@dataclass(frozen=True)
class Noise:
    """The noise of a run's positions: the form of its covariance and sigma; "none" and 0 without noise."""

    form: str
    sigma: float


@dataclass(frozen=True)
class RunRecords:
    """The contents of a run directory; the model is loaded when it is used."""

    path: Path
    config: TrainConfig
    metrics: list[dict[str, float]]
    """The lines of metrics.jsonl, oldest first."""
    results: list[Evaluation]
    status: Status = Status()

    @property
    def grid(self) -> Grid:
        (height, width), patch = self.config.encoder.image_size, self.config.encoder.patch_size
        return height // patch, width // patch

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, from its status or else from the steps per epoch in its metrics."""
        last = next((line for line in reversed(self.metrics) if line.get("epoch", 0) > 1e-6), None)
        counted = None if last is None else round(last["step"] / last["epoch"] * self.config.optim.epochs)
        return max(0, self.status.total_steps or counted or 0) or None

    @property
    def noise(self) -> Noise:
        """The noise that the config asks for."""
        positions = self.config.positions
        silent = positions.kind != "stochastic" or positions.sigma == 0 or positions.apply_to == "none"
        return Noise("none", 0.0) if silent else Noise(positions.covariance, positions.sigma)

    @cached_property
    def last_values(self) -> dict[str, float]:
        """The newest value of every measurement."""
        found: dict[str, float] = {}
        for line in self.metrics:
            found |= {name: value for name, value in line.items() if isinstance(value, int | float)}
        return found

    def newest(self, name: str) -> float:
        """Return the newest value of a measurement; InputError if there is none."""
        if name not in self.last_values:
            raise InputError(
                f"The run {self.path} has no '{name}' in its metrics.jsonl: train it further or leave it out."
            )
        return self.last_values[name]

    @cached_property
    def objective(self) -> Objective:
        """The model of the newest checkpoint, in evaluation mode, on the CPU; InputError if there is no checkpoint."""
        newest = RunFolder(self.path).newest_checkpoint()
        if newest is None:
            raise InputError(
                f"The run {self.path} has no checkpoint: train it until it has saved one, or leave it out."
            )
        return objective_of(newest)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the run's encoder, without checkpoints, RUN#encoder and initial weights."""
        names = [(Path(one.encoder), one) for one in self.results if not one.is_baseline]
        return [one for path, one in names if path.parent.name != "checkpoints" and not path.name.endswith("#encoder")]

    def scores(self) -> dict[ScoreKey, float]:
        """Return the scores of the run's encoder and the newest ones of the online probe."""
        found = {score_key(one, score): score.value for one in self.evaluations for score in one.scores}
        last = self.last_values
        return found | {ScoreKey(key, title): last[key] for key, title in ONLINE.items() if key in last}


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return run directories; a sweep directory is replaced by its finished runs, or by all runs if none is finished."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not (plan := path / PLAN_FILE).exists():
            found.append(path)
            continue
        remedy = "restore it, or name the runs"
        variants = from_plain(dict[str, Any], read_record(plan, dict[str, Any], remedy).get("variants"), "variants")
        runs = [
            run
            for variant in variants
            for run in runs_by_seed(path / variant).values()
            if RunFolder(run).config_file.exists()
        ]
        if not runs:
            raise InputError(f"The sweep {path} has no runs yet: start it, or name others.")
        found += [run for run in runs if (run / SCORES_FILE).exists()] or runs
    return found


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone, in the order of their seeds."""

    name: str
    runs: list[RunRecords]

    @property
    def first(self) -> RunRecords:
        """The run whose model is shown."""
        return self.runs[0]


def group_seeds(runs: Sequence[RunRecords]) -> list[RunGroup]:
    """Group runs that differ in their seed alone; names are paths without the part that all have in common."""
    groups: dict[tuple[TrainConfig, int], list[RunRecords]] = {}
    seen: dict[TrainConfig, int] = {}
    for run in runs:
        # A second run of the same seed is not another sample: it gets a separate group.
        whole = dataclasses.replace(run.config, out="", stop_after_steps=None)
        seen[whole] = seen.get(whole, -1) + 1
        groups.setdefault((dataclasses.replace(whole, seed=0), seen[whole]), []).append(run)
    ordered = [sorted(group, key=lambda run: run.config.seed) for group in groups.values()]
    return [RunGroup(*named) for named in zip(_group_names(ordered), ordered, strict=True)]


def _group_names(groups: Sequence[Sequence[RunRecords]]) -> list[str]:
    """Return what the paths of each group's runs begin with, without what all groups have in common and seeds' numbers."""
    paths = [[run.path.resolve() for run in group] for group in groups]
    shared = os.path.commonpath([path.parent for group in paths for path in group])
    names = []
    for group in paths:
        own = [os.path.relpath(path, shared) for path in group]
        # stop-0 and stop-1, or stop/seed-0 and stop/seed-1, become stop.
        same = os.path.commonprefix(own)  # noqa: RUF071
        name = own[0] if len(own) == 1 else re.sub(r"\W*(seed)?\W*\d*$", "", same)
        names.append(name or (Path(shared).name if len(groups) == 1 else own[0]))
    return names


def read_records(path: str | Path) -> RunRecords:
    """Read a run directory; one without a run is an InputError."""
    folder = RunFolder(Path(path))
    results, status = read_results(folder.path / RESULTS_FILE), Status()
    with suppress(InputError):
        status = from_plain(Status, folder.status() or {})
    return RunRecords(folder.path, folder.config(), read_metrics(folder.path), results, status)


def check_same_grid(runs: Sequence[RunRecords]) -> None:
    """Raise InputError if the images of runs are cut into different numbers of patches."""
    for run in runs[1:]:
        if run.grid != runs[0].grid:
            (rows, columns), (other_rows, other_columns) = runs[0].grid, run.grid
            raise InputError(
                f"{runs[0].path} has {rows}x{columns} patches and {run.path} has {other_rows}x{other_columns}: compare runs of "
                "one grid."
            )


def check_comparable(runs: Sequence[RunRecords], forms: Sequence[str] | None = None) -> None:
    """Raise InputError for runs that differ in more than noise and seed, are at different steps, or are given twice.

    Args:
        runs: runs with stochastic or fixed sine-cosine positions.
        forms: the covariances that are compared; None: any.
    """
    check_same_grid(runs)
    # Two runs with noise must agree in more fields than a run without noise can.
    first = next((run for run in runs if run.noise.form != "none"), runs[0])
    seen: dict[tuple[Noise, int], RunRecords] = {}
    for run in runs:
        noise, positions = run.noise, run.config.positions
        if positions.kind == "learned" or noise.form not in ("none", *(forms or [noise.form])):
            raise InputError(
                f"The run {run.path} has {positions.kind} positions with the covariance '{positions.covariance}', which this "
                "figure does not compare: leave it out."
            )
        if fields := _differences(first, run):
            raise InputError(
                f"{first.path} and {run.path} differ in {fields[0]}: compare runs that differ in noise and seed alone."
            )
        if run.last_step != first.last_step:
            raise InputError(
                f"{first.path} is at step {first.last_step} and {run.path} at step {run.last_step}: finish both, or leave "
                "one out."
            )
        same = seen.setdefault((noise, run.config.seed), run)
        if same is not run:
            raise InputError(f"{same.path} and {run.path} are the same run with the same seed: give it once.")


def _differences(one: RunRecords, other: RunRecords) -> list[str]:
    """Return the fields in which two configs differ, except those about noise and those that change nothing."""
    silent = "none" in (one.noise.form, other.noise.form)
    free = INCIDENTAL | NOISE | (NOISE_DETAILS if silent else set())
    fields = changes(one.config, other.config)
    return [name for name in fields if name not in free and not name.startswith(WITHOUT_EFFECT)]


def common_score(runs: Sequence[RunRecords], name: str | None = None) -> ScoreKey:
    """Return the score of that name, or else the top-1 accuracy nearest to the paper's protocol, that all runs have."""
    if name is None:
        known = [run.scores() for run in runs]
        common = {key: key.rank for key in known[0] if key.rank is not None and all(key in one for one in known)}
        if not common:
            lacking = next((run for run in runs if not run.scores()), runs[-1])
            raise InputError(
                f"The run {lacking.path} shares no top-1 accuracy with the others: evaluate all of them alike with 'stop-mim "
                "evaluate', or train them with probe.data."
            )
        return min(common, key=lambda key: common[key])
    key = ScoreKey(name, ONLINE[name]) if name in ONLINE else score_key(*find_score(runs[0].evaluations, name))
    for run in runs:
        if key not in run.scores():
            raise InputError(
                f"The run {run.path} has no score '{name}' that was measured alike: evaluate all runs alike."
            )
    return key


def grouped(runs: Sequence[RunRecords], key: Callable[[RunRecords], Key]) -> dict[Key, list[RunRecords]]:
    """Group runs by a key, in the order in which the keys appear."""
    groups: dict[Key, list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def spreads_by_sigma(
    runs: Sequence[RunRecords], measure: Callable[[RunRecords], float]
) -> dict[str, dict[float, Spread]]:
    """Return a measurement's spread over seeds, by the form of the noise and then by sigma, in increasing order."""
    groups = grouped(runs, lambda run: run.noise)
    found: dict[str, dict[float, Spread]] = {}
    for noise in sorted(groups, key=lambda noise: noise.sigma):
        found.setdefault(noise.form, {})[noise.sigma] = spread([measure(run) for run in groups[noise]])
    return found
