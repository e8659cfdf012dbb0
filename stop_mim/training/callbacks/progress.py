"""Progress: a bar in a terminal, a line now and then elsewhere, and the run directory's status.json."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn

from stop_mim.errors import first_line, printable
from stop_mim.tables import as_rate
from stop_mim.training.callbacks.health import SIGNS
from stop_mim.training.run_folder import RunFolder, RunState
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer
from stop_mim.training.watch import watch

# Lines outside of a terminal: a second after the first, then after twice as long each time.
FIRST_INTERVAL, LAST_INTERVAL = 1.0, 10.0
SECONDS_BETWEEN_STATUSES = 60.0
# Over which the speed is averaged; the first step, which may compile, does not count.
PACE_SECONDS = 300.0
BAR_WIDTH = 20
# Measured rarely, and shown with the step at which they were.
SHOWN_SIGNS = {"rankme": "{:.0f}", "A_norm": "{:.2g}", "mask_token_norm": "{:.2g}"}
SHOWN_WITH_STEP = {
    **{SIGNS[name].key: f"{SIGNS[name].label} {form}" for name, form in SHOWN_SIGNS.items()},
    "probe/linear_top1": "probe {:.1f}",
    "probe/knn_top1": "kNN {:.1f}",
}


class ProgressDisplay:
    """Shows how much of some work is done, and messages above it.

    Args:
        console: where to print; default: standard error.
        shown: whether to print at all.
        log: called with every message, such as `RunFolder.log`.
    """

    def __init__(
        self, console: Console | None = None, shown: bool = True, log: Callable[[str], None] | None = None
    ) -> None:
        self.console = console or Console(stderr=True)
        self.shown, self.log = shown, log
        self._live = shown and self.console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining"),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            disable=not self._live,
            speed_estimate_period=PACE_SECONDS,
        )
        self._last_line, self._interval, self._closed = 0.0, FIRST_INTERVAL, False
        self._tasks: dict[str, Task] = {}

    def __enter__(self) -> "ProgressDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, SystemExit):
            self._progress.stop()

    def update(self, name: str, done: int, total: int, values: str = "") -> None:
        """Show how much of the work of that name is done, and the time that is left."""
        watch.moves()
        if is_new := name not in self._tasks:
            number = self._progress.add_task(name, total=total, completed=done, values="", left="")
            self._tasks[name] = self._progress.tasks[number]
        task = self._tasks[name]
        self._progress.update(task.id, completed=done, total=total)
        left = f"{timedelta(seconds=round(task.time_remaining))} left" if task.time_remaining else ""
        # The values are cut where the line would be too long, not the numbers before them.
        counts = f"{name} {done}/{total} {left}"
        shown = values[: max(0, self.console.width - BAR_WIDTH - len(counts) - 4)]
        self._progress.update(task.id, left=left, values=shown)
        rests = not is_new and done != total and time.monotonic() - self._last_line <= self._interval
        if self.shown and not self._live and not rests:
            self._interval = FIRST_INTERVAL if is_new else min(2 * self._interval, LAST_INTERVAL)
            self._last_line = time.monotonic()
            self._print(" ".join(filter(None, [f"{name} {done:,}/{total:,}", left, values])))

    def say(self, text: str, style: str | None = None) -> None:
        """Print and log a line."""
        if self.shown:
            self._print(text, style)
            if self.log is not None:
                self.log(text)

    def _print(self, text: str, style: str | None = None) -> None:
        if self._closed:
            return
        try:
            self.console.print(escape(printable(text)), style=style, soft_wrap=True, highlight=False)
        # rich exits when the pipe of its output is closed.
        except (OSError, SystemExit):
            self._closed = True
            # SIGHUP makes a training save and end; under nohup, which ignores it, the training continues without output.
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                raise
            signal.raise_signal(signal.SIGHUP)

    def warn(self, text: str) -> None:
        self.say(f"Warning: {text}", style="bold yellow")


class ShowProgress(Callback):
    """Calls `show(steps done, steps of this session, newest values as text)` at the start and after every step."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self.show = show
        self._speed, self._loss = "", ""
        self._rare: dict[int, str] = {}

    def start(self, trainer: Trainer) -> None:
        self.show(trainer.done, trainer.last_step, "decoding the first images…")

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        measured = trainer.measurements
        if "images_per_second" in measured:
            self._speed = f"{as_rate(measured['images_per_second'])} images/s"
        if outcomes:
            self._loss = f"loss {trainer.loss:.4f}"
        if rare := [text.format(measured[name]) for name, text in SHOWN_WITH_STEP.items() if name in measured]:
            self._rare = {trainer.done: " ".join(rare)}
        rarely = [f"({text} at step {step:,})" for step, text in self._rare.items()]
        self.show(trainer.done, trainer.last_step, " ".join(filter(None, [self._speed, self._loss, *rarely])))


class RecordStatus(Callback):
    """Keeps status.json of the run directory: written at the start, at most once a minute, and at the end."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._written = 0.0

    def start(self, trainer: Trainer) -> None:
        self._write(trainer, "running")

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        if time.monotonic() - self._written > SECONDS_BETWEEN_STATUSES:
            self._write(trainer, "running")

    def end(self, trainer: Trainer) -> None:
        if isinstance(trainer.error, KeyboardInterrupt):
            self._write(trainer, "stopped", "interrupted without saving")
        elif trainer.error is not None:
            self._write(trainer, "failed", first_line(trainer.error))
        elif trainer.done == trainer.total_steps:
            self._write(trainer, "finished")
        else:
            self._write(trainer, "stopped", f"by {trainer.interrupted_by}" if trainer.interrupted_by else "")

    def _write(self, trainer: Trainer, state: RunState, message: str = "") -> None:
        self._written = time.monotonic()
        self.folder.write_status(state, trainer.done, trainer.total_steps, message)
