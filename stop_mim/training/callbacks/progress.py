"""Progress: a bar in a terminal, a line now and then elsewhere, and the run directory's status.json."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from stop_mim.errors import first_line
from stop_mim.training.run_folder import RunFolder, RunState
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_STATUSES = 60.0
# How the newest of these measurements is shown beside the bar.
SHOWN = {
    "images_per_second": "{:,.0f} images/s",
    "loss": "loss {:.4f}",
    "health/rankme": "RankMe {:.0f}",
    "health/A_norm": "|A| {:.2g}",
    "health/mask_token_norm": "|m̃| {:.2g}",
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
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            disable=not self._live,
        )
        self._last_line = 0.0
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "ProgressDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, total: int, values: str = "") -> None:
        """Show how much of the work of that name is done."""
        if self._live:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, completed=done, values=values)
            self._progress.update(self._tasks[name], completed=done, total=total, values=values)
        elif self.shown and (time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or done == total):
            self._last_line = time.monotonic()
            self.console.print(escape(f"{name} {done}/{total} {values}".rstrip()), soft_wrap=True, highlight=False)

    def say(self, text: str, style: str | None = None) -> None:
        """Print and log a line."""
        if self.shown:
            self._progress.console.print(escape(text), style=style, soft_wrap=True, highlight=False)
            if self.log is not None:
                self.log(text)

    def warn(self, text: str) -> None:
        """Print and log a warning."""
        self.say(f"Warning: {text}", style="bold yellow")


class ShowProgress(Callback):
    """Calls `show(steps done, steps of this session, newest measurements as text)` after every step."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self.show = show
        self._newest: dict[str, str] = {}

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        for name, text in SHOWN.items():
            if name in trainer.measurements:
                self._newest[name] = text.format(trainer.measurements[name])
        self.show(trainer.done, trainer.end, " ".join(self._newest[name] for name in SHOWN if name in self._newest))


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
