"""What evaluations found: as a table on the screen, as JSON beside the run, as CSV for other programs."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from stop_mim.errors import InputError
from stop_mim.evaluation.accuracy import accuracy_interval
from stop_mim.files import write_atomically

RESULTS_FILE = "results.json"
FORMAT = "stop-mim results 1"
# What tells whether an evaluation is the same as an earlier one, whose place it then takes.
IDENTITY = ("encoder", "task", "label", "data", "test_data", "protocol", "seed")


@dataclass(frozen=True)
class Evaluation:
    """One task done with one encoder: what was measured, and all that one must know to measure it again."""

    encoder: str
    task: str
    label: str
    data: str
    test_data: str
    protocol: dict[str, Any]
    seed: int
    metrics: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    """Fingerprints, numbers of images, versions, hardware, date."""
    details: dict[str, Any] = field(default_factory=dict)
    """What does not fit into one number a name, such as the scores of every sequence."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% interval of every accuracy that was measured once on all test images."""
        count = self.facts.get("test_images")
        names = [name for name in self.metrics if is_accuracy(name) and f"{name}_std" not in self.metrics]
        return {name: accuracy_interval(self.metrics[name], count) for name in names} if count else {}

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "intervals": {name: list(bounds) for name, bounds in self.intervals().items()}}


def is_accuracy(name: str) -> bool:
    """Whether a metric is the accuracy, in percent, on the test images."""
    last = name.rpartition("/")[2]
    return last.partition("@")[0] in ("top1", "top5")


def results_table(evaluations: Sequence[Evaluation]) -> Table:
    """A row for each number, a column for each encoder."""
    encoders = list(dict.fromkeys(evaluation.encoder for evaluation in evaluations))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for evaluation in evaluations:
        for name, text in _cells(evaluation).items():
            rows.setdefault((evaluation.label, name), {})[evaluation.encoder] = text
    labels = {label for label, _ in rows}
    table = Table(title="Test scores in %, with 95% intervals or ± standard deviation over draws", title_justify="left")
    for heading in (["label"] if labels != {"class"} else []) + ["score"]:
        # Where the screen is narrow, encoders' names are folded: a score whose name is cut short could be another.
        table.add_column(heading, no_wrap=True)
    for encoder in encoders:
        table.add_column(escape(encoder), justify="right", overflow="fold")
    for (label, name), cells in rows.items():
        first = [label] if labels != {"class"} else []
        table.add_row(*(escape(cell) for cell in [*first, name, *(cells.get(encoder, "") for encoder in encoders)]))
    return table


def _cells(evaluation: Evaluation) -> dict[str, str]:
    intervals, cells = evaluation.intervals(), {}
    for name, value in evaluation.metrics.items():
        if _is_one_of_many(name, evaluation.task) or not (is_accuracy(name) or name.startswith("video/")):
            continue
        spread = evaluation.metrics.get(f"{name}_std")
        low, high = intervals.get(name, (None, None))
        about = f" ± {spread:.1f}" if spread is not None else "" if low is None else f" [{low:.1f}, {high:.1f}]"
        cells[name] = f"{value:.1f}{about}"
    return cells


def _is_one_of_many(name: str, task: str) -> bool:
    """Whether a number is of one draw or of one learning rate, of which the files have all and the table what came of them."""
    return "@" in (name if task == "low-shot" else name.rpartition("/")[0])


def read_results(path: Path) -> list[dict[str, Any]]:
    """The evaluations that a file holds; none if there is no file."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        if found["format"] == FORMAT:
            return found["evaluations"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} does not hold results of stop-mim: move it away, so that nothing in it is lost.")


def add_results(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations beside those that the file holds, in the place of the same ones done before."""
    new = [evaluation.as_json() for evaluation in evaluations]
    # Through JSON, so that tuples and lists compare alike.
    keys = [_identity(json.loads(json.dumps(one))) for one in new]
    kept = [one for one in read_results(path) if _identity(one) not in keys]
    write_json(path, {"format": FORMAT, "evaluations": [*kept, *new]})


def _identity(evaluation: dict[str, Any]) -> list[Any]:
    return [evaluation.get(name) for name in IDENTITY]


def results_document(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Evaluations for one file; where there is but one of videos, its sequences stand at the top."""
    document: dict[str, Any] = {"format": FORMAT, "evaluations": [evaluation.as_json() for evaluation in evaluations]}
    videos = [evaluation for evaluation in evaluations if "sequences" in evaluation.details]
    return {**document, **videos[0].details} if len(videos) == 1 else document


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write it in one step."""
    text = json.dumps(document, indent=2)
    _write(path, lambda file: file.write_text(text + "\n"))


def write_csv(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """A line for each number."""

    def write(file: Path) -> None:
        with file.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["encoder", "task", "label", "data", "seed", "metric", "value", "low", "high"])
            for one in evaluations:
                for name, value in one.metrics.items():
                    low, high = one.intervals().get(name, ("", ""))
                    writer.writerow([one.encoder, one.task, one.label, one.data, one.seed, name, value, low, high])

    _write(path, write)


def _write(path: Path, write: Any) -> None:
    try:
        write_atomically(path, write)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name a file in a folder that can.") from error


def today() -> str:
    """The date and time, for the record."""
    return datetime.now(UTC).isoformat(timespec="seconds")
