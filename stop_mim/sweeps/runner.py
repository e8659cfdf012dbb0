"""A named sweep from its first run to its table: resumable, side by side, and not stopped by a run that fails."""

import contextlib
import fcntl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.estimate import (
    can_be_timed,
    in_words,
    measured_rate,
    seconds_left,
    steps_done,
    steps_of,
    timed_rate,
)
from stop_mim.sweeps.grid import with_overrides
from stop_mim.sweeps.outcome import Outcome, read_outcome
from stop_mim.sweeps.plan import Job, Plan, make_plan, out_folder, require_same_plan, write_plan
from stop_mim.sweeps.pool import Pool
from stop_mim.sweeps.slots import choose_side_by_side, slot_environments
from stop_mim.sweeps.summary import SUMMARY_JSON, Summary, show_summary, summarise, write_summary
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.distributed import choose_device
from stop_mim.training.trainer import Interruption, catch_interruption

LOCK_FILE, LOGS = ".lock", "logs"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class SweepResult:
    """Where a sweep stands when `run_sweep` returns."""

    out: Path
    finished: int
    failed: int
    total: int
    summary: Summary | None
    """None after a dry run."""
    interrupted_by: str | None


def run_sweep(name: str, config: SweepConfig, console: Console | None = None) -> SweepResult:
    """Run what is missing of a sweep, or show what would be run, and summarise all that is there."""
    console = console or Console()
    plan, out = make_plan(name, config), out_folder(name, config)
    require_same_plan(out, plan)
    choose_device(config.speed.device)
    jobs = list(plan.jobs(out, config.seeds, config.variants))
    if config.dry_run:
        show_grid(plan, jobs, config, console)
        return SweepResult(out, *_count(jobs), None, None)
    with ProgressDisplay(console) as display:
        display.say(f"{name} at {plan.scale} scale: {len(jobs)} runs in {out}; images and labels are opened first.")
        source = open_source(plan.base.data)
        plan.probe.check()
        with locked(out) as lock:
            write_plan(out, plan)
            interruption = _run(jobs, out, config, source, display, lock)
    asked = [(job.variant, job.seed) for job in jobs]
    summary = summarise(out, asked=asked)
    write_summary(out, summary)
    show_summary(summary, console)
    console.print(escape(f"Written to {out / SUMMARY_JSON} and .csv."), highlight=False, soft_wrap=True)
    result = SweepResult(out, *_count(jobs), summary, interruption.signal_name)
    _tell_end(result, console)
    return result


def _run(
    jobs: Sequence[Job], out: Path, config: SweepConfig, source: ImageSource, display: ProgressDisplay, lock: int
) -> Interruption:
    """Every job that is not over yet, so many at a time as there are places."""
    waiting = deque(job for job in jobs if _is_due(job, config.retry_failed))
    first = jobs[0].config
    height, width = first.encoder.image_size
    at_once = choose_side_by_side(config.side_by_side, first, len(source) * 3 * height * width)
    environments = slot_environments(at_once, config.speed.device)[: max(1, len(waiting))]
    progress = Progress(jobs, waiting, len(source), display)
    with catch_interruption() as interruption, Pool(environments, out / LOGS, [lock]) as pool:
        while (waiting or pool.busy()) and not interruption:
            for job, outcome in pool.ended():
                progress.over(job, outcome)
            for worker in pool.idle():
                if waiting:
                    worker.give(waiting.popleft())
            progress.show(pool.busy())
            time.sleep(POLL_SECONDS)
        if interruption:
            display.say(f"{interruption.signal_name}: the runs that are under way save and stop.")
            pool.stop()
    return interruption


def _is_due(job: Job, retry_failed: bool) -> bool:
    outcome = read_outcome(job.folder)
    return outcome is None or (outcome.error is not None and retry_failed)


class Progress:
    """One line for the whole sweep: steps of all runs, runs that are over, and the time left."""

    def __init__(self, jobs: Sequence[Job], due: Sequence[Job], n_images: int, display: ProgressDisplay) -> None:
        self.display, self._n_images = display, n_images
        self._total = sum(steps_of(job, n_images) for job in jobs)
        self._runs, self._over = len(jobs), len(jobs) - len(due)
        self._failed = sum(1 for job in jobs if (one := read_outcome(job.folder)) is not None and one.error is not None)
        due_steps = {job.name: steps_of(job, n_images) for job in due}
        self._settled = self._total - sum(due_steps.values())
        self._underway = {job.name: steps_done(job) for job in due}
        self._before, self._started, self._shown = self._done(), time.monotonic(), 0.0

    def _done(self) -> int:
        return self._settled + sum(self._underway.values())

    def over(self, job: Job, outcome: Outcome) -> None:
        """A run has ended: its steps are behind us, whichever way."""
        self._underway.pop(job.name, None)
        self._settled += steps_of(job, self._n_images)
        self._over += 1
        self._failed += outcome.error is not None
        if outcome.error is not None:
            self.display.say(f"{job.name} failed: {outcome.error}", style="yellow")

    def show(self, busy: Sequence[Job]) -> None:
        """The line, at most once a second."""
        now = time.monotonic()
        if now - self._shown < 1 and self._over < self._runs:
            return
        self._shown = now
        self._underway |= {job.name: steps_done(job) for job in busy}
        done, parts = self._done(), [f"{self._over} of {self._runs} runs"]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [", ".join(job.name for job in busy)] if busy else []
        # The first steps wait for processes to begin; a terminal's bar has a time of its own.
        if done - self._before > self._total / 100 and busy and not self.display.console.is_terminal:
            left = (self._total - done) * (now - self._started) / (done - self._before)
            parts.append(f"about {in_words(left)} left")
        # All steps may be done while the last run is still being probed.
        done = self._total if self._over == self._runs else min(done, self._total - 1)
        self.display.update("sweep", done, self._total, "; ".join(parts))


def _count(jobs: Sequence[Job]) -> tuple[int, int, int]:
    outcomes = [read_outcome(job.folder) for job in jobs]
    finished = sum(one is not None and one.error is None for one in outcomes)
    failed = sum(one is not None and one.error is not None for one in outcomes)
    return finished, failed, len(jobs)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Hold the folder for one sweep; its workers inherit the lock, so that it lasts until the last of them is gone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK_FILE).open("w")
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): choose another --out.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"A sweep is running in {out} already: wait for it, or choose another --out.") from None
        yield file.fileno()


def _tell_end(result: SweepResult, console: Console) -> None:
    left = result.total - result.finished - result.failed
    lines = []
    if result.interrupted_by:
        lines.append(f"Stopped by {result.interrupted_by}, {left} runs are left: go on with the same command.")
    if result.failed:
        lines.append(f"{result.failed} runs failed; the same command with --retry-failed tries them again.")
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True, style="yellow")


def show_grid(plan: Plan, jobs: Sequence[Job], config: SweepConfig, console: Console) -> None:
    """What would be run, and for how long."""
    seeds = ", ".join(map(str, config.seeds))
    epochs = plan.base.optim.epochs
    title = f"{plan.sweep} at {plan.scale} scale: recipe {plan.recipe}, epochs: {epochs}, seeds: {seeds}"
    table = Table("variant", "changes", "runs", title=escape(title), title_justify="left")
    for variant in plan.variants:
        own = [job for job in jobs if job.variant == variant.name]
        over = sum(read_outcome(job.folder) is not None for job in own)
        changes = ", ".join(f"{path} {value}" for path, value in variant.overrides.items())
        name = f"{variant.name} (baseline)" if variant.name == plan.baseline else variant.name
        table.add_row(escape(name), escape(changes), f"{len(own)}" + (f" ({over} over)" if over else ""))
    console.print(table)
    console.print(escape(estimate(plan, jobs, config)), highlight=False, soft_wrap=True)


def estimate(plan: Plan, jobs: Sequence[Job], config: SweepConfig) -> str:
    """The time that is left, and what it was computed from; or why it is not known."""
    left = [job for job in jobs if _is_due(job, config.retry_failed)]
    if not left:
        return "All runs are over: the same command without --dry-run shows the table."
    device = choose_device(config.speed.device)
    if not plan.base.data:
        return f"{len(left)} runs to go. Time: unknown without --data."
    rate = measured_rate(jobs)
    if rate is None and not can_be_timed(plan, device):
        return f"{len(left)} runs to go. Time: unknown until one of them has begun; --dry-run tells it then."
    rate = rate or timed_rate(with_overrides(plan.base, plan.variant(plan.baseline).overrides))
    at_once = len(slot_environments(choose_side_by_side(config.side_by_side, left[0].config), config.speed.device))
    seconds = seconds_left(rate, left, len(open_source(plan.base.data)), at_once)
    probes = "not counted" if rate.probe_seconds is None else f"{in_words(rate.probe_seconds)} a run"
    return (
        f"{len(left)} runs to go, {at_once} at a time: about {in_words(seconds)}, if each keeps up "
        f"{rate.images_per_second:,.0f} images/s ({rate.origin}); probes: {probes}."
    )
