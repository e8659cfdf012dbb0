"""What a benchmark measured: as a record, as a JSON file and as tables."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from stop_mim.benchmark.timing import Spread, StepMeasurement
from stop_mim.files import write_atomically
from stop_mim.tables import Table

FORMAT = "stop-mim bench 1"
# Narrower tables would cut their numbers.
LEAST_WIDTH = 84


@dataclass(frozen=True)
class BenchReport:
    """All measurements, and everything needed to repeat them."""

    recipe: str
    environment: dict[str, Any]
    config: dict[str, Any]
    bench: dict[str, Any]
    hardware: str
    images: str
    images_per_step: int
    batches_per_step: int
    tokens: dict[str, int]
    dtype: str
    execution: str
    """Whether the step was compiled and captured."""
    step: StepMeasurement
    parts: dict[str, Spread]
    """Seconds of each part in a step."""
    busy_seconds: float | None
    """Time per step during which kernels run; None on the CPU."""
    flops: int
    """Operations of a step in matrix products."""
    ceiling: float
    """Operations per second of one large matrix product, around the measurement of the step."""
    notes: tuple[str, ...] = ()

    @property
    def host_gap(self) -> float | None:
        """Seconds per step during which no kernel runs."""
        return None if self.busy_seconds is None else max(0.0, self.step.seconds.median - self.busy_seconds)

    @property
    def flops_per_second(self) -> float:
        """Operations per second of the step."""
        return self.flops / self.step.seconds.median


def write_report(path: Path, report: BenchReport) -> None:
    """Write the report as JSON."""
    derived = {"host_gap_seconds": report.host_gap, "part_of_ceiling": report.flops_per_second / report.ceiling}
    text = json.dumps({"format": FORMAT, **asdict(report), "derived": derived}, indent=2)
    write_atomically(path, lambda file: file.write_text(f"{text}\n"))


def print_report(report: BenchReport) -> None:
    """Print all tables and notes."""
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    for table in (step_table(report), facts_table(report)):
        console.print(table.on_screen())
    for note in report.notes:
        console.print(escape(note), highlight=False, soft_wrap=True)


def step_table(report: BenchReport) -> Table:
    """Return the whole step and its parts."""
    rate, whole, gap = report.step.images_per_second, report.step.seconds, report.host_gap
    parts = [
        [f"  {name}", _milliseconds(spread.median), _quartiles(spread), f"{spread.median / whole.median:.1%}"]
        for name, spread in report.parts.items()
    ]
    gaps = ["does not apply", "", ""] if gap is None else [_milliseconds(gap), "", f"{gap / whole.median:.1%}"]
    rows = [
        ["images/s", _rate(rate.median), f"{_rate(rate.low)} to {_rate(rate.high)}", ""],
        ["step", _milliseconds(whole.median), _quartiles(whole), ""],
        *parts,
        ["  host gaps", *gaps],
    ]
    title = f"{report.recipe} on {report.hardware}: a training step"
    return Table(title, ["what", "median", "quartiles", "of the step"], rows)


def facts_table(report: BenchReport) -> Table:
    """Return sizes, memory and operations."""
    counts, part = report.tokens, report.flops_per_second / report.ceiling
    batches = f" in {report.batches_per_step} batches" if report.batches_per_step > 1 else ""
    rows = {
        "images": f"{report.images}; {report.images_per_step} per step{batches}",
        "tokens": f"{counts['grid']} patches, {counts['context']} context, {counts['blocks']} x {counts['target']} targets",
        "execution": report.execution,
        "peak memory": f"{report.step.peak_memory / 2**30:,.2f} GiB",
        "operations per step": f"{report.flops / 1e9:,.1f} GFLOP in matrix products",
        "speed": f"{report.flops_per_second / 1e12:,.3f} TFLOP/s, {part:.1%} of the ceiling",
        "ceiling": f"{report.ceiling / 1e12:,.3f} TFLOP/s, one large matrix product in {report.dtype} on this machine",
        "torch": str(report.environment["packages"]["torch"]),
    }
    return Table("", ["what", "value"], [list(row) for row in rows.items()], names=2)


def _rate(images: float) -> str:
    return f"{images:,.{0 if images >= 1000 else 1}f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low * 1e3:,.3f} to {spread.high * 1e3:,.3f}"
