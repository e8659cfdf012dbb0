"""What a benchmark found, as tables on the screen."""

from typing import Literal

from rich.markup import escape
from rich.table import Table

from stop_mim.benchmark.findings import BenchReport
from stop_mim.benchmark.timing import Spread

NUMBERS = (
    "median",
    "quartiles",
    "of the step",
    "context",
    "targets",
    "ms a step",
    "images/s",
    "ours is",
    "peak memory",
    "GiB",
)
WHOLE = (*NUMBERS, "implementation", "tokens")


def step_table(report: BenchReport) -> Table:
    """The whole step and its parts."""
    table = _table(
        f"{report.recipe} on {report.hardware}: a training step", "what", "median", "quartiles", "of the step"
    )
    rate, whole = report.step.images_per_second, report.step.seconds
    table.add_row("images/s", _rate(rate.median), f"{_rate(rate.low)} to {_rate(rate.high)}", "")
    table.add_row("step", _milliseconds(whole.median), _quartiles(whole), "")
    for name, spread in report.parts.items():
        part = spread.median / whole.median
        table.add_row(f"  {name}", _milliseconds(spread.median), _quartiles(spread), f"{part:.1%}")
    gap = report.host_gap
    text = "does not apply" if gap is None else _milliseconds(gap)
    table.add_row("  host gaps", text, "", "" if gap is None else f"{gap / whole.median:.1%}")
    return table


def facts_table(report: BenchReport) -> Table:
    """Sizes, memory and operations."""
    table = _table("", "", "", shows_header=False)
    counts, part = report.tokens, report.flops_per_second / report.ceiling
    batches = f" in {report.batches_per_step} batches" if report.batches_per_step > 1 else ""
    rows = {
        "images": f"{report.images}; {report.images_per_step} a step{batches}",
        "tokens": f"{counts['grid']} patches, {counts['context']} context, {counts['blocks']} x {counts['target']} targets",
        "execution": report.execution,
        "peak memory": _gibibytes(report.step.peak_memory),
        "operations a step": f"{report.flops / 1e9:,.1f} GFLOP in matrix products",
        "speed": f"{report.flops_per_second / 1e12:,.3f} TFLOP/s, {part:.1%} of the ceiling",
        "ceiling": f"{report.ceiling / 1e12:,.3f} TFLOP/s, one large matrix product in {report.dtype} on this machine",
        "torch": str(report.environment["packages"]["torch"]),
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def comparison_table(report: BenchReport) -> Table:
    """Ours and others; how many times as fast as each ours is, and the memory where it can be told."""
    headings = ("implementation", "masks", "tokens", "images/s", "ours is")
    tells_memory = any(one.step.peak_memory is not None for one in report.comparison)
    table = _table(
        "Other implementations: tokens of context + targets, ± half the distance of the quartiles",
        *headings,
        *["GiB"] * tells_memory,
    )
    ours = report.comparison[0].step.images_per_second.median
    for one in report.comparison:
        rate, memory = one.step.images_per_second, one.step.peak_memory
        table.add_row(
            escape(one.name),
            escape(one.masks),
            f"{one.context}+{one.targets}",
            f"{_rate(rate.median)} ± {_rate((rate.high - rate.low) / 2, beside=rate.median)}",
            f"{ours / rate.median:.2f}x",
            *["" if memory is None else f"{memory / 2**30:,.1f}"] * tells_memory,
        )
    return table


def scaling_table(report: BenchReport) -> Table:
    """The cost of other sizes, on synthetic images."""
    table = _table(
        "The cost of other sizes, on synthetic images", "change", "value", "ms a step", "images/s", "peak memory"
    )
    for one in report.scaling:
        if one.step is None:
            table.add_row(one.change, one.value, "left out", "", "")
            continue
        rate = one.step.images_per_second.median
        memory = _gibibytes(one.step.peak_memory)
        table.add_row(one.change, one.value, f"{one.step.seconds.median * 1e3:,.2f}", _rate(rate), memory)
    return table


def _table(title: str, *headings: str, shows_header: bool = True) -> Table:
    table = Table(title=escape(title) or None, title_justify="left", title_style="bold", show_header=shows_header)
    for name in headings:
        justify: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=name in WHOLE, overflow="fold")
    return table


def _rate(images: float, beside: float | None = None) -> str:
    """Images a second, with as many decimals as the rate beside which it stands."""
    return f"{images:,.{0 if (images if beside is None else beside) >= 1000 else 1}f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low * 1e3:,.3f} to {spread.high * 1e3:,.3f}"


def _gibibytes(size: int | None) -> str:
    return "not told" if size is None else f"{size / 2**30:,.2f} GiB"
