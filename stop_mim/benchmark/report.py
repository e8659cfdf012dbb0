"""What a benchmark measured: as a record, as a JSON file and as tables."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stop_mim.benchmark.timing import Spread, StepMeasurement
from stop_mim.files import write_atomically

FORMAT = "stop-mim bench 1"
# Narrower tables would cut their numbers.
LEAST_WIDTH = 80
TEXT_COLUMNS = ("what", "implementation", "masks", "change", "value", "")
MAY_WRAP = ("what", "masks", "change", "value", "")


@dataclass(frozen=True)
class ComparedStep:
    """The step of one implementation, with the masks that it was given."""

    name: str
    masks: str
    context: int
    targets: int
    step: StepMeasurement


@dataclass(frozen=True)
class ScaledStep:
    """The step of one variant, or why it was not measured."""

    change: str
    value: str
    step: StepMeasurement | None
    skipped: str = ""


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
    ceilings: tuple[float, ...]
    """Operations per second of one large matrix product: before and after the step, then around each other implementation."""
    comparison: tuple[ComparedStep, ...] = ()
    scaling: tuple[ScaledStep, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def host_gap(self) -> float | None:
        """Seconds per step during which no kernel runs."""
        return None if self.busy_seconds is None else max(0.0, self.step.seconds.median - self.busy_seconds)

    @property
    def ceiling(self) -> float:
        """Operations per second of one large matrix product, around the measurement of the step."""
        return max(self.ceilings[:2])

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
    tables: list[Callable[[BenchReport], Table]] = [step_table, facts_table]
    tables += [comparison_table] if report.comparison else []
    tables += [scaling_table] if report.scaling else []
    for table in tables:
        console.print(table(report))
    for note in report.notes:
        console.print(escape(note), highlight=False, soft_wrap=True)


def step_table(report: BenchReport) -> Table:
    """Return the whole step and its parts."""
    title = f"{report.recipe} on {report.hardware}: a training step"
    table = _table(title, "what", "median", "quartiles", "of the step")
    rate, whole = report.step.images_per_second, report.step.seconds
    table.add_row("images/s", _rate(rate.median), f"{_rate(rate.low)} to {_rate(rate.high)}", "")
    table.add_row("step", _milliseconds(whole.median), _quartiles(whole), "")
    for name, spread in report.parts.items():
        fraction = f"{spread.median / whole.median:.1%}"
        table.add_row(f"  {name}", _milliseconds(spread.median), _quartiles(spread), fraction)
    gap = report.host_gap
    text, fraction = ("does not apply", "") if gap is None else (_milliseconds(gap), f"{gap / whole.median:.1%}")
    table.add_row("  host gaps", text, "", fraction)
    return table


def facts_table(report: BenchReport) -> Table:
    """Return sizes, memory and operations."""
    table = _table("", "", "", shows_header=False)
    counts, part = report.tokens, report.flops_per_second / report.ceiling
    batches = f" in {report.batches_per_step} batches" if report.batches_per_step > 1 else ""
    rows = {
        "images": f"{report.images}; {report.images_per_step} per step{batches}",
        "tokens": f"{counts['grid']} patches, {counts['context']} context, {counts['blocks']} x {counts['target']} targets",
        "execution": report.execution,
        "peak memory": _gibibytes(report.step.peak_memory),
        "operations per step": f"{report.flops / 1e9:,.1f} GFLOP in matrix products",
        "speed": f"{report.flops_per_second / 1e12:,.3f} TFLOP/s, {part:.1%} of the ceiling",
        "ceiling": f"{report.ceiling / 1e12:,.3f} TFLOP/s, one large matrix product in {report.dtype} on this machine",
        "torch": str(report.environment["packages"]["torch"]),
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def comparison_table(report: BenchReport) -> Table:
    """Return ours and other implementations; memory only where it can be measured."""
    has_memory = any(one.step.peak_memory is not None for one in report.comparison)
    title = "Other implementations: tokens of context + targets, ± half the distance of the quartiles"
    table = _table(title, "implementation", "masks", "tokens", "images/s", "ours is", *["GiB"] * has_memory)
    ours = report.comparison[0].step.images_per_second.median
    for one in report.comparison:
        rate, memory = one.step.images_per_second, one.step.peak_memory
        table.add_row(
            escape(one.name),
            escape(one.masks),
            f"{one.context}+{one.targets}",
            f"{_rate(rate.median)} ± {_rate((rate.high - rate.low) / 2, beside=rate.median)}",
            f"{ours / rate.median:.2f}x",
            *["" if memory is None else f"{memory / 2**30:,.1f}"] * has_memory,
        )
    return table


def scaling_table(report: BenchReport) -> Table:
    """Return the cost of other sizes."""
    title = "The cost of other sizes, on synthetic images"
    table = _table(title, "change", "value", "ms per step", "images/s", "peak memory")
    for one in report.scaling:
        if one.step is None:
            table.add_row(one.change, one.value, "skipped", "", "")
            continue
        rate, memory = one.step.images_per_second.median, _gibibytes(one.step.peak_memory)
        table.add_row(one.change, one.value, f"{one.step.seconds.median * 1e3:,.2f}", _rate(rate), memory)
    return table


def _table(title: str, *headings: str, shows_header: bool = True) -> Table:
    table = Table(title=escape(title) or None, title_justify="left", title_style="bold", show_header=shows_header)
    for name in headings:
        justify: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        table.add_column(name, justify=justify, no_wrap=name not in MAY_WRAP, overflow="fold")
    return table


def _rate(images: float, beside: float | None = None) -> str:
    """Format images per second, with the decimals of the rate beside it."""
    return f"{images:,.{0 if (images if beside is None else beside) >= 1000 else 1}f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low * 1e3:,.3f} to {spread.high * 1e3:,.3f}"


def _gibibytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**30:,.2f} GiB"
