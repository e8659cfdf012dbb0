"""How time is taken: by events on a GPU and by the clock elsewhere, many times, with median and quartiles."""

import gc
import json
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]

# What a trace calls the things that keep a GPU busy.
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The spread of these values; of a single one there is none."""
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    def scaled(self, factor: float) -> "Spread":
        """Every value times a positive number."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def over(self, amount: float) -> "Spread":
        """An amount divided by every value: a rate, if these are times."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_seconds(work: Work, device: torch.device, steps: int, repeats: int) -> list[float]:
    """Wall time of one step, in each of some runs of so many steps; the device is waited for at the ends of a run alone."""
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
    """Time of each of some calls on their own: between two events on a GPU, by the clock elsewhere."""
    for _ in range(warmup):
        work()
    wait_for(device)
    if device.type != "cuda":
        return [_clocked(work) for _ in range(calls)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in events]


def waited_seconds(work: Work, device: torch.device, calls: int, warmup: int) -> list[float]:
    """Time of each of some calls by the clock, the wait for the device included: for work that the host does too."""

    def waited() -> None:
        work()
        wait_for(device)

    for _ in range(warmup):
        waited()
    return [_clocked(waited) for _ in range(calls)]


def _clocked(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def busy_seconds(work: Work, device: torch.device, steps: int) -> float | None:
    """Time of a step during which any kernel or copy runs on the GPU, by torch.profiler; None where there is no GPU."""
    if device.type != "cuda":
        return None
    wait_for(device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Some versions of torch tell that they forget what was recorded before, which is wanted here.
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
    """Length of the union of intervals: what runs at the same time counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def forget_peak(device: torch.device) -> None:
    """Give unused memory back, and begin to look for the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on the GPU since `forget_peak`; on the CPU the most that the process ever took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # macOS counts bytes, others count kibibytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there: the GPU has an error of its own for it, the CPU's is a plain one."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
