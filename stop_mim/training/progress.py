"""What a person sees while it trains: a bar in a terminal, now and then a line elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressDisplay:
    """Counts work of a known length, with a rate, the time left and a few values."""

    def __init__(self, console: Console | None = None, shown: bool = True) -> None:
        self.console = console or Console(stderr=True)
        self.shown = shown
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
        """So much of the work of that name is done."""
        if self._live:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, completed=done, values=values)
            self._progress.update(self._tasks[name], completed=done, total=total, values=values)
        elif self.shown and (time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or done == total):
            self._last_line = time.monotonic()
            self.console.print(escape(f"{name} {done}/{total} {values}".rstrip()), soft_wrap=True, highlight=False)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line above the bar."""
        if self.shown:
            self._progress.console.print(escape(text), style=style, soft_wrap=True, highlight=False)
