"""A sweep from its first run to its tables: what is finished is skipped, and a run that fails does not stop the others."""

import shlex
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from stop_mim.benchmark.bench import open_run
from stop_mim.data.labelled import read_image_list
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.evaluation.data import kinds_of_data, open_task_data
from stop_mim.files import locked
from stop_mim.interruption import catch_interruption
from stop_mim.records import read_record, write_json
from stop_mim.sweeps.grid import Axes
from stop_mim.sweeps.launch import launch, places
from stop_mim.sweeps.plan import Job, Plan, SweepConfig, make_plan
from stop_mim.sweeps.summary import Summary, show_summary, summarise, write_summary
from stop_mim.tables import Table, as_rate, duration, say
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import choose_device
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.trial import take_trial_steps

FAILED_FILE, LOCK_FILE = "failed.json", ".lock"
# For --dry-run. A whole batch of a large recipe takes minutes on a CPU, where time grows with the number of images.
MEASURED_STEPS, MEASURED_IMAGES_ON_CPU = 3, 16


def run_sweep(
    name: str,
    config: SweepConfig,
    base: TrainConfig | None = None,
    console: Console | None = None,
    axes: Axes = MappingProxyType({}),
) -> Summary | None:
    """Run what is missing of a sweep and summarise its directory; a dry run shows what would be run and returns None.

    `base` and `axes` are those of `make_plan`.
    """
    console = console or Console()
    plan = make_plan(name, config, base, axes)
    plan.check()
    if config.dry_run:
        show_grid(plan, console)
        return None
    # Data that cannot be used are refused before hours are spent on training.
    if config.low_shot_list is not None:
        read_image_list(config.low_shot_list, open_source(plan.labelled_data))
    configs = [plan.config(variant) for variant in plan.chosen]
    for data in dict.fromkeys(data for one in configs for data in (one.data, one.probe.data) if data):
        open_source(data)
    labels = set()
    if "images" in kinds_of_data(plan.labelled_data):
        labels = {one.label for one in open_task_data(plan.labelled_data, config.test_data)}
    for transfer, data in config.transfers.items():
        if transfer in labels:
            raise InputError(
                f"transfer has the name '{transfer}', which is a label of {plan.labelled_data}: give another name."
            )
        open_task_data(data)
    plan.out.mkdir(parents=True, exist_ok=True)
    with locked(plan.out / LOCK_FILE) as ours:
        if not ours:
            raise InputError(f"Another sweep runs in {plan.out}: wait for it, or choose another --out.")
        plan.keep()
        interrupted_by = _run(plan, console)
    summary = summarise(plan, failures(plan), interrupted_by)
    write_summary(plan.out, summary)
    show_summary(summary, console)
    say(console, f"Written to {plan.out / 'summary.json'}, summary.csv, summary.md and summary.tex.")
    if interrupted_by:
        say(console, f"Stopped by {interrupted_by}: the same command continues.", "yellow")
    if summary.failed:
        say(console, f"Failed runs: {len(summary.failed)}. --retry-failed runs them again.", "yellow")
    return summary


def _run(plan: Plan, console: Console) -> str | None:
    """Run every job that is due; return the signal that interrupted the sweep, if one did."""
    waiting, about = due(plan), f"{plan.sweep} at {plan.options.scale} scale"
    say(console, f"{about}: {len(waiting)} of {len(plan.jobs)} runs to do in {plan.out}.")
    # Closed where an error ends the loop, so that running processes save and stop.
    with catch_interruption() as stop, closing(launch(waiting, plan, stop)) as runs:
        for number, (job, error) in enumerate(runs, start=1):
            record(plan.out, job, error)
            end = f"failed: {error}" if error else "finished." if job.finished else "stopped."
            say(console, f"{number} of {len(waiting)}: {job.name} {end}", "yellow" if error else None)
    return stop.signal_name


def due(plan: Plan) -> list[Job]:
    """Return the runs that are not finished; failed ones only with --retry-failed."""
    failed = {} if plan.options.retry_failed else read_failed(plan.out)
    # What fails on the data of --transfer is evaluated again: they may be others now.
    return [job for job in plan.jobs if not job.finished and (job.evaluated or job.name not in failed)]


def read_failed(out: Path) -> dict[str, str]:
    """Return why runs failed, by name."""
    file = out / FAILED_FILE
    return read_record(file, dict[str, str], "delete it") if file.exists() else {}


def failures(plan: Plan) -> dict[str, str]:
    """Return why runs that were asked for and are not finished failed, by name."""
    failed = read_failed(plan.out)
    return {job.name: failed[job.name] for job in plan.jobs if not job.finished and job.name in failed}


def record(out: Path, job: Job, error: str | None) -> None:
    """Record why a run failed, or remove its earlier record if it did not."""
    before = read_failed(out)
    failed = {name: reason for name, reason in before.items() if name != job.name}
    failed |= {} if error is None else {job.name: error}
    if failed != before:
        write_json(out / FAILED_FILE, failed)


def show_grid(plan: Plan, console: Console) -> None:
    """Print the variants, the commands of the runs that are due, and the estimated time."""
    options, seeds = plan.options, ", ".join(map(str, plan.options.seeds))
    title = f"{plan.sweep} at {options.scale} scale: {plan.recipe}, epochs: {plan.base.optim.epochs}, seeds: {seeds}"
    rows = []
    for variant in plan.chosen:
        own = [job.finished for job in plan.jobs if job.variant == variant]
        changed = ", ".join(f"{path} {value}" for path, value in plan.variants[variant].items())
        name = f"{variant} (baseline)" if variant == plan.baseline else variant
        rows.append([name, changed, f"{sum(own)} of {len(own)}"])
    console.print(Table(title, ["variant", "changes", "finished"], rows, names=2))
    left = due(plan)
    for job in left:
        for arguments in job.commands:
            say(console, f"stop-mim {shlex.join(arguments)}")
    if not left:
        done = all(job.finished for job in plan.jobs)
        tables = "All runs are done: the same command without --dry-run prints the tables."
        say(console, tables if done else "The runs that are left have failed: --retry-failed runs them again.")
        return
    at_once = len(left) if options.launch.is_job else len(places(options.side_by_side, plan.base.speed.device))
    untrained = [job for job in left if not job.evaluated]
    time = "evaluation only"
    if untrained:
        seconds, origin = estimate(plan, untrained, console)
        time = "give --data to estimate the time of training"
        if seconds:
            time = f"about {duration(seconds / min(at_once, len(untrained)))} of training"
        time += f" ({origin}); evaluation comes on top"
    say(console, f"Runs to do: {len(left)}, {min(at_once, len(left))} at a time: {time}.")


def estimate(plan: Plan, left: Sequence[Job], console: Console) -> tuple[float, str]:
    """Return the seconds of all trainings that are left, one after the other, and what they are estimated from."""
    finished = [(job, lines) for job in plan.jobs if job.evaluated and (lines := read_metrics(job.folder))]
    if finished:
        seconds = [
            lines[-1]["step"]
            * plan.config(job.variant).optim.batch_size
            / statistics.median(line["images_per_second"] for line in lines)
            for job, lines in finished
        ]
        return statistics.median(seconds) * len(left), f"as in {len(finished)} finished runs"
    images = len(open_source(plan.base.data)) if plan.base.data else 0
    rates, total = dict[Any, float](), 0.0
    for job in left:
        config = plan.config(job.variant)
        # What a step costs depends on these alone.
        kind = (config.encoder, config.predictor, config.objective, config.masks, config.optim.batch_size)
        if kind not in rates:
            say(console, f"Measuring a few steps of {job.variant} …")
            rates[kind] = images_per_second(config)
        total += config.optim.epochs * images / rates[kind]
    speed = " to ".join(dict.fromkeys(as_rate(rate) for rate in (min(rates.values()), max(rates.values()))))
    return total, f"{speed} images/s on {choose_device(plan.base.speed.device).type}, without reading images"


def images_per_second(config: TrainConfig) -> float:
    """Return the speed of training, measured over a few steps of random images."""
    if choose_device(config.speed.device).type == "cpu":
        fewer = min(config.optim.batch_size, MEASURED_IMAGES_ON_CPU)
        # A given number of images at once is for the whole batch.
        speed = replace(config.speed, batch_size_per_device=None)
        config = replace(config, optim=replace(config.optim, batch_size=fewer), speed=speed)
    with ProgressDisplay(Console(quiet=True), shown=False) as display:
        run = open_run(config, False, display, display.say)
        return config.optim.batch_size / take_trial_steps(run.trainer, MEASURED_STEPS).seconds_per_step
