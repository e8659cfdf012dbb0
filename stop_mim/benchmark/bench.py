"""`stop-mim bench`: the training step of a run, its parts, memory and speed, measured on this machine.

The step is the trainer's own: `pretrain.assemble` builds it here as it does for training.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.flops import TokenCounts, step_flops
from stop_mim.benchmark.parts import measure_parts
from stop_mim.benchmark.timing import Spread, StepMeasurement, Work, busy_seconds, matrix_ceiling, measure_step
from stop_mim.constraints import check_effects
from stop_mim.errors import InputError
from stop_mim.files import require_writable
from stop_mim.records import write_json
from stop_mim.tables import Table, as_rate, say
from stop_mim.training.acceleration import CapturedStep, is_compiled, is_half
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, choose_device
from stop_mim.training.inputs import StepInputs, SyntheticImages
from stop_mim.training.pretrain import Parts, assemble, memory_of_step
from stop_mim.training.run_folder import environment
from stop_mim.training.trial import forget_peak, settle

FORMAT = "stop-mim bench 1"
PROFILED_STEPS = 5
# Narrower tables would cut their numbers.
LEAST_WIDTH = 84
PARTS_NOTE = (
    "Each part is timed alone, and they need not add up to the step; backward is forward and backward minus forward."
)


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


def run_bench(config: TrainConfig, bench: BenchConfig, recipe: str = "custom") -> BenchReport:
    """Measure, print the tables and write the JSON file; `bench.images` "auto" means synthetic images."""
    check_effects(config)
    if bench.json is not None:
        require_writable(f"bench.json, {bench.json},", bench.json)
    device = one_device(config)
    with ProgressDisplay() as display, _memory_error_named(device):
        report = measure_run(config, bench, recipe, device, display)
    print_report(report)
    if bench.json is not None:
        derived = {"host_gap_seconds": report.host_gap, "part_of_ceiling": report.flops_per_second / report.ceiling}
        write_json(bench.json, {"format": FORMAT, **asdict(report), "derived": derived})
    return report


def open_run(config: TrainConfig, uses_data: bool, display: ProgressDisplay, warn: Callable[[str], None]) -> Parts:
    """Assemble the run as training does, in one process and without a run directory."""
    ranks = Ranks(0, 1, 1, one_device(config))
    if not uses_data:
        # Synthetic images have no number from which settings could be derived.
        config = replace(config, optim=replace(config.optim, derive=()))
    inputs = StepInputs(settle(config, ranks, display.say, memory_of_step), ranks)
    images = inputs.open_images(progress=partial(display.update, "decoding images")) if uses_data else None
    return assemble(inputs, images or SyntheticImages(inputs), display.say, warn)


@contextmanager
def steps_of(run: Parts) -> Iterator[Work]:
    """Give a function that takes the next step of the trainer; the loader ends with the context."""
    with closing(run.trainer.batches(0)) as batches:
        yield lambda: run.trainer.take_step(batches)


def measure_run(
    config: TrainConfig, bench: BenchConfig, recipe: str, device: torch.device, display: ProgressDisplay
) -> BenchReport:
    """Measure the step and its parts."""
    uses_data, notes = bench.images == "data", [PARTS_NOTE]

    def show(name: str) -> None:
        display.say(f"measuring: {name}")

    def warn(text: str) -> None:
        display.warn(text)
        notes.append(text)

    show("whole step")
    # The type in which the layers multiply matrices.
    dtype = torch.bfloat16 if is_half(config.speed.precision, device) else torch.float32
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
        config=asdict(run.config),
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
def _memory_error_named(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The CPU allocator raises a plain RuntimeError.
        lacks_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not lacks_memory:
            raise
        raise InputError(
            f"The images of a step do not fit into the memory of {hardware_name(device)}: process fewer at once with "
            "--speed.batch-size-per-device."
        ) from error


def print_report(report: BenchReport) -> None:
    """Print all tables and notes."""
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    for table in (step_table(report), facts_table(report)):
        console.print(table)
    for note in report.notes:
        say(console, note)


def step_table(report: BenchReport) -> Table:
    """Return the whole step and its parts."""
    rate, whole, gap = report.step.images_per_second, report.step.seconds, report.host_gap
    parts = [
        [f"  {name}", _milliseconds(spread.median), _quartiles(spread), f"{spread.median / whole.median:.1%}"]
        for name, spread in report.parts.items()
    ]
    gaps = ["does not apply", "", ""] if gap is None else [_milliseconds(gap), "", f"{gap / whole.median:.1%}"]
    rows = [
        ["images/s", as_rate(rate.median), f"{as_rate(rate.low)} to {as_rate(rate.high)}", ""],
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


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low * 1e3:,.3f} to {spread.high * 1e3:,.3f}"
