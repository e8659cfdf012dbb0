"""A training step of any make, measured: time, rate and memory."""

import torch

from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.findings import StepMeasurement
from stop_mim.benchmark.timing import Spread, Work, peak_memory, run_seconds


def measure_step(work: Work, device: torch.device, images: int, bench: BenchConfig) -> StepMeasurement:
    """Repeated runs of a step of so many images, after some to warm up; the caller has called `forget_peak` before."""
    for _ in range(bench.warmup):
        work()
    seconds = Spread.of(run_seconds(work, device, bench.steps, bench.repeats))
    # The peak of the whole process says nothing of one of several steps that it measures.
    peak = peak_memory(device) if device.type == "cuda" else None
    return StepMeasurement(seconds, seconds.over(images), peak)
