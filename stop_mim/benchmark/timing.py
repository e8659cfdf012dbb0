"""Time and memory of some work: CUDA events on a GPU, the clock elsewhere; medians with quartiles."""

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from stop_mim.benchmark.config import BenchConfig
from stop_mim.training.trial import peak_memory, wait_for

Work = Callable[[], object]

# Categories of a profiler trace that keep a GPU busy.
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
SIDE_ON_GPU, SIDE_ON_CPU = 8192, 1024
PRODUCTS, REPEATS = 10, 5


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Return the spread of these values; a single value has none."""
        return Spread(*np.quantile(values, (0.5, 0.25, 0.75)).tolist())

    def scaled(self, factor: float) -> "Spread":
        """Multiply by a positive number."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def over(self, amount: float) -> "Spread":
        """Divide an amount by every value: a rate, if these are times."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)

    def less(self, other: "Spread") -> "Spread":
        """Subtract another spread, as far apart as the quartiles allow; at least 0."""
        values = (self.median - other.median, self.low - other.high, self.high - other.low)
        return Spread(*(max(0.0, value) for value in values))


@dataclass(frozen=True)
class StepMeasurement:
    """Time, rate and memory of a training step."""

    seconds: Spread
    images_per_second: Spread
    peak_memory: int
    """Bytes."""


def measure_step(work: Work, device: torch.device, images: int, bench: BenchConfig) -> StepMeasurement:
    """Time repeated runs of a step on `images` images, after a warm-up; call `forget_peak` before."""
    for _ in range(bench.warmup):
        work()
    seconds = Spread.of(run_seconds(work, device, bench.steps, bench.repeats))
    return StepMeasurement(seconds, seconds.over(images), peak_memory(device))


def run_seconds(work: Work, device: torch.device, steps: int, repeats: int) -> list[float]:
    """Return the wall time per step of each run; the device is waited for only between runs."""
    found = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(steps):
            work()
        wait_for(device)
        found.append((time.perf_counter() - start) / steps)
    return found


def call_seconds(work: Work, device: torch.device, calls: int, warmup: int) -> list[float]:
    """Return the time of each call alone, between two events on a GPU, by the clock elsewhere."""
    for _ in range(warmup):
        work()
    wait_for(device)
    if device.type != "cuda":
        return run_seconds(work, device, 1, calls)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in events]


def busy_seconds(work: Work, device: torch.device, steps: int) -> float | None:
    """Return the time per step during which a kernel or copy runs on the GPU; None without a GPU."""
    if device.type != "cuda":
        return None
    wait_for(device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Some versions of torch warn that earlier recordings are dropped.
        warnings.simplefilter("ignore")
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                work()
            wait_for(device)
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    intervals = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in DEVICE_WORK]
    return covered(intervals) / 1e6 / steps


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one large square matrix product, the most that a step can reach."""
    side = SIDE_ON_GPU if device.type == "cuda" else SIDE_ON_CPU
    # Random numbers: with zeros a GPU draws less power, and may run faster.
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=result)

    run_seconds(multiply, device, PRODUCTS, 1)
    return 2 * side**3 / statistics.median(run_seconds(multiply, device, PRODUCTS, REPEATS))
