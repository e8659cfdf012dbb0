"""Tables of what was measured, at the width of a plain terminal: whole words, and numbers that are not cut."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stop_mim.benchmark.bench import print_report
from stop_mim.benchmark.findings import BenchReport, ComparedStep, StepMeasurement
from stop_mim.benchmark.tables import comparison_table
from stop_mim.benchmark.timing import Spread

GIBIBYTE = 2**30


def step(rate: float, memory: int | None) -> StepMeasurement:
    rates = Spread(rate, rate * 0.9, rate * 1.1)
    return StepMeasurement(Spread(256 / rate, 256 / rates.high, 256 / rates.low), rates, memory)


def compared(memory: int | None) -> tuple[ComparedStep, ...]:
    rows = [
        ("stop-mim", "on device", 4463.0),
        ("plain PyTorch", "beforehand", 758.4),
        ("lightly", "collator", 2517.0),
        ("stable-pretraining", "in its step", 12741.0),
    ]
    return tuple(ComparedStep(name, masks, 157, 1138, step(rate, memory)) for name, masks, rate in rows)


@pytest.fixture
def report() -> BenchReport:
    return BenchReport(
        recipe="stop-vitb16",
        environment={"packages": {"torch": "2.11.0"}},
        config={},
        bench={},
        hardware="NVIDIA H200",
        images="synthetic, on the device",
        images_per_step=256,
        batches_per_step=1,
        tokens={"grid": 196, "context": 49, "blocks": 4, "target": 33},
        dtype="bfloat16",
        execution="compiled",
        step=step(4463.0, 13 * GIBIBYTE),
        parts={"context encoder forward": Spread(12.3456, 11.2345, 13.4567)},
        busy_seconds=0.05,
        flops=10**13,
        ceilings=(7e14, 7e14),
    )


def shown(table, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue()


def test_a_comparison_on_a_gpu_breaks_no_word_at_80_columns(report):
    text = shown(comparison_table(replace(report, comparison=compared(99 * GIBIBYTE))))
    for words in ("implementation", "stop-mim", "plain PyTorch", "stable-pretraining", "on device", "beforehand"):
        assert words in text
    assert "12,741 ± 1,274" in text
    assert "758.4 ± 75.8" in text
    assert "157+1138" in text
    assert "99.0" in text


def test_memory_has_no_column_where_it_is_told_for_nobody(report):
    text = shown(comparison_table(replace(report, comparison=compared(None))))
    assert "GiB" not in text
    assert "not told" not in text
    assert "5.88x" in text


def test_numbers_are_whole_on_a_narrow_terminal(report, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    print_report(replace(report, comparison=compared(99 * GIBIBYTE)))
    text = capsys.readouterr().out
    for words in ("11,234.500 to 13,456.700", "12,345.600 ms", "4,017 to 4,909", "12,741 ± 1,274", "99.0"):
        assert words in text
