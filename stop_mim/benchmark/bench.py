"""`stop-mim bench`: the training step of a run, its parts, memory and speed, measured on this machine.

The step is the trainer's own: `pretrain.assemble` builds it here as it does for training.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.flops import TokenCounts, step_flops
from stop_mim.benchmark.parts import measure_parts
from stop_mim.benchmark.report import BenchReport, print_report, write_report
from stop_mim.benchmark.timing import (
    Work,
    busy_seconds,
    lacks_memory,
    matrix_ceiling,
    measure_step,
)
from stop_mim.constraints import check_effects
from stop_mim.errors import InputError
from stop_mim.files import require_writable
from stop_mim.training.acceleration import CapturedStep, is_compiled, is_half
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, choose_device
from stop_mim.training.inputs import StepInputs, SyntheticImages
from stop_mim.training.pretrain import Parts, assemble
from stop_mim.training.run_folder import environment
from stop_mim.training.trial import forget_peak

PROFILED_STEPS = 5
PARTS_NOTE = (
    "Each part is timed alone, and they need not add up to the step; backward is forward and backward minus forward."
)


def run_bench(
    config: TrainConfig, bench: BenchConfig, recipe: str = "custom", console: Console | None = None
) -> BenchReport:
    """Measure, print the tables and write the JSON file; `bench.images` "auto" means synthetic images."""
    check_effects(config)
    if bench.json is not None:
        require_writable(f"bench.json, {bench.json},", bench.json)
    device = one_device(config)
    with ProgressDisplay(console) as display, _memory_error_named(config, device):
        report = measure_run(config, bench, recipe, display, lambda name: display.say(f"measuring: {name}"))
    print_report(report)
    if bench.json is not None:
        write_report(bench.json, report)
    return report


def open_run(config: TrainConfig, uses_data: bool, display: ProgressDisplay, warn: Callable[[str], None]) -> Parts:
    """Assemble the run as training does, in one process and without a run directory."""
    inputs = StepInputs(config, Ranks(0, 1, 1, one_device(config)))
    images = inputs.open_images(progress=partial(display.update, "decoding images")) if uses_data else None
    return assemble(inputs, images or SyntheticImages(inputs), display.say, warn)


@contextmanager
def steps_of(run: Parts) -> Iterator[Work]:
    """Give a function that takes the next step of the trainer; the loader ends with the context."""
    with closing(run.trainer.batches(0)) as batches:
        yield lambda: run.trainer.take_step(batches)


def measure_run(
    config: TrainConfig, bench: BenchConfig, recipe: str, display: ProgressDisplay, show: Callable[[str], None]
) -> BenchReport:
    """Measure the step and its parts."""
    device, uses_data, notes = one_device(config), bench.images == "data", [PARTS_NOTE]

    def warn(text: str) -> None:
        display.warn(text)
        notes.append(text)

    show("whole step")
    dtype = multiplied_in(config, device)
    before = matrix_ceiling(device, dtype)
    forget_peak(device)
    run = open_run(config, uses_data, display, warn)
    inputs, images_per_step = run.inputs, run.inputs.per_device * run.inputs.batches_per_step
    with steps_of(run) as step:
        measured = measure_step(step, device, images_per_step, bench)
        show("host gaps")
        busy = busy_seconds(step, device, PROFILED_STEPS)
    parts = measure_parts(run, uses_data, bench.steps, bench.warmup, show, warn)
    show("ceiling")
    counts = TokenCounts.of(inputs.draw_masks(0)[0], run.objective.encoder.grid)
    return BenchReport(
        recipe=recipe,
        environment=environment(),
        config=asdict(config),
        bench={name: str(value) if isinstance(value, Path) else value for name, value in asdict(bench).items()},
        hardware=hardware_name(device),
        images=f"{config.data}; {run.images.description}" if uses_data else run.images.description,
        images_per_step=images_per_step,
        batches_per_step=inputs.batches_per_step,
        tokens=asdict(counts),
        dtype=str(dtype).removeprefix("torch."),
        execution=execution_of(run),
        step=measured,
        parts=parts,
        busy_seconds=busy,
        flops=step_flops(config, counts, images_per_step),
        ceiling=max(before, matrix_ceiling(device, dtype)),
        notes=tuple(notes),
    )


def multiplied_in(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the type in which the layers multiply matrices."""
    return torch.bfloat16 if is_half(config.speed.precision, device) else torch.float32


def execution_of(run: Parts) -> str:
    """Describe how the step runs."""
    ways = ["compiled" if is_compiled(run.objective) else "eager"]
    ways += ["captured as a CUDA graph"] if isinstance(run.trainer.step, CapturedStep) else []
    ways += ["recomputed"] if run.config.speed.recompute else []
    return ", ".join(ways)


def one_device(config: TrainConfig) -> torch.device:
    """Return the device to measure."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("bench measures one process: start it without torchrun.")
    device = choose_device(config.speed.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def hardware_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = Path("/proc/cpuinfo")
    lines = models.read_text().splitlines() if models.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


@contextmanager
def _memory_error_named(config: TrainConfig, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        images = config.speed.batch_size_per_device or config.optim.batch_size
        raise InputError(
            f"{images} images at a time do not fit into the memory of {hardware_name(device)}: give fewer with "
            "--speed.batch-size-per-device."
        ) from error
