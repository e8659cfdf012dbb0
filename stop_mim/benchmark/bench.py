"""`stop-mim bench`: a run's training step, its parts, its memory and its speed, measured on this machine."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from stop_mim.benchmark.ceiling import matrix_ceiling
from stop_mim.benchmark.comparison import (
    ON_DEVICE,
    Batch,
    Maker,
    Setting,
    check_comparable,
    load_contenders,
    measure_comparison,
)
from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.findings import BenchReport, ComparedStep, write_report
from stop_mim.benchmark.flops import step_flops
from stop_mim.benchmark.measurement import measure_step
from stop_mim.benchmark.parts import measure_parts, part_names
from stop_mim.benchmark.scaling import VARIANTS, measure_scaling
from stop_mim.benchmark.tables import comparison_table, facts_table, scaling_table, step_table
from stop_mim.benchmark.timing import busy_seconds, forget_peak, lacks_memory, peak_memory
from stop_mim.benchmark.workload import Workload, one_device
from stop_mim.errors import InputError
from stop_mim.files import require_writable
from stop_mim.training.acceleration import is_half
from stop_mim.training.config import TrainConfig
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.run_folder import environment

PROFILED_STEPS = 5
# The ceiling may move by so much from one implementation to the next before a comparison comes with a warning.
STEADY = 1.1
LEAST_WIDTH = 80
PARTS_NOTE = (
    "Each part is timed on its own, so that they need not add up to the step; backward is forward and backward together less "
    "the forward."
)


def run_bench(
    config: TrainConfig, bench: BenchConfig, recipe: str = "custom", console: Console | None = None
) -> BenchReport:
    """Measure, print the tables and write the file that is asked for; `bench.images` of auto are synthetic ones."""
    uses_data = bench.images == "data"
    contenders: dict[str, Maker] = {}
    if bench.compare:
        check_comparable(config, uses_data)
        contenders = load_contenders()
    if bench.json is not None:
        require_writable(f"bench.json, {bench.json},", bench.json)
    device = one_device(config)
    total = 3 + len(part_names(config, uses_data)) + len(contenders) + bench.scaling * VARIANTS
    with ProgressDisplay(console) as display, _memory_told(config, device):
        progress = _Progress(display, total)
        report, setting, batch = _measure_ours(config, bench, recipe, progress)
        if contenders:
            report = _compare(report, contenders, setting, batch, bench, progress)
        if bench.scaling:
            report = _scale(report, setting, bench, progress)
        progress.end()
    print_report(report)
    if bench.json is not None:
        write_report(bench.json, report)
    return report


def print_report(report: BenchReport) -> None:
    """All tables, and what has to be said about them."""
    console = Console()
    # Narrower, the tables would cut their numbers without a sign.
    console.width = max(console.width, LEAST_WIDTH)
    tables = [step_table(report), facts_table(report)]
    tables += [comparison_table(report)] if report.comparison else []
    tables += [scaling_table(report)] if report.scaling else []
    for table in tables:
        console.print(table)
    for note in report.notes:
        console.print(escape(note), highlight=False, soft_wrap=True)


def _measure_ours(
    config: TrainConfig, bench: BenchConfig, recipe: str, progress: "_Progress"
) -> tuple[BenchReport, Setting, Batch]:
    """The step and its parts, the sizes that they had, and one of their batches; the memory is free again afterwards."""
    device = one_device(config)
    progress.tell("whole step")
    before = matrix_ceiling(device, multiplied_in(config, device))
    forget_peak(device)
    with closing(Workload(config, bench.images == "data", progress.display)) as workload:
        report = _report(workload, bench, recipe, before, progress)
        batch = (next(workload.images), workload.draw_masks(0))
        sizes = (workload.counts, workload.per_device, workload.batches_per_step)
        return report, Setting(config, device, *sizes, workload.autocast), batch


def _report(
    workload: Workload, bench: BenchConfig, recipe: str, ceiling_before: float, progress: "_Progress"
) -> BenchReport:
    config, device, images = workload.config, workload.device, workload.images_per_step
    step = measure_step(workload.step, device, images, bench)
    step = replace(step, peak_memory=peak_memory(device))
    progress.tell("host gaps")
    busy = busy_seconds(workload.step, device, PROFILED_STEPS)
    parts = measure_parts(workload, bench.steps, bench.warmup, progress.tell)
    progress.tell("ceiling")
    dtype = multiplied_in(config, device)
    return BenchReport(
        recipe=recipe,
        environment=environment(),
        config=asdict(config),
        bench={name: str(value) if isinstance(value, Path) else value for name, value in asdict(bench).items()},
        hardware=hardware_name(device),
        images=workload.image_source,
        images_per_step=images,
        batches_per_step=workload.batches_per_step,
        tokens=asdict(workload.counts),
        dtype=str(dtype).removeprefix("torch."),
        execution=_execution(workload),
        step=step,
        parts=parts,
        busy_seconds=busy,
        flops=step_flops(config, workload.counts, images),
        ceilings=(ceiling_before, matrix_ceiling(device, dtype)),
        notes=(PARTS_NOTE, *workload.notes),
    )


def multiplied_in(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The type in which the layers' matrices are multiplied."""
    return torch.bfloat16 if is_half(config.speed.precision, device) else torch.float32


def _execution(workload: Workload) -> str:
    """How the step ran, in words."""
    ways = ["compiled" if workload.is_compiled else "eager", "captured as a CUDA graph" if workload.is_captured else ""]
    speed = workload.config.speed
    chosen = {"recomputed": speed.recompute}
    ways += [way for way, is_on in chosen.items() if is_on]
    return ", ".join(way for way in ways if way)


def _compare(
    report: BenchReport,
    contenders: dict[str, Maker],
    setting: Setting,
    batch: Batch,
    bench: BenchConfig,
    progress: "_Progress",
) -> BenchReport:
    counts, device = setting.counts, setting.device
    # On the CPU the memory of one step among others cannot be told.
    step = report.step if device.type == "cuda" else replace(report.step, peak_memory=None)
    ours = ComparedStep("stop-mim", ON_DEVICE, counts.context, counts.blocks * counts.target, step)
    torch.compiler.reset()
    ceilings = list(report.ceilings)

    def tell(name: str) -> None:
        progress.tell(name)
        ceilings.append(matrix_ceiling(device, multiplied_in(setting.config, device)))

    others, notes = measure_comparison(contenders, setting, batch, bench, tell)
    ceilings.append(matrix_ceiling(device, multiplied_in(setting.config, device)))
    return replace(
        report,
        comparison=(ours, *others),
        ceilings=tuple(ceilings),
        notes=(*report.notes, *notes, *_unsteady(ceilings)),
    )


def _unsteady(ceilings: Sequence[float]) -> list[str]:
    """What has to be said if the machine itself was faster at one time than at another."""
    low, high = min(ceilings) / 1e12, max(ceilings) / 1e12
    if high <= STEADY * low:
        return []
    return [
        f"The machine was not steady: its ceiling moved between {low:,.3f} and {high:,.3f} TFLOP/s from one implementation to "
        "the next. Something else runs on it, or it is throttled: compare again when it is at rest."
    ]


def _scale(report: BenchReport, setting: Setting, bench: BenchConfig, progress: "_Progress") -> BenchReport:
    found = measure_scaling(setting.config, bench, setting.per_device, setting.counts, progress.tell)
    skipped = [f"{one.change}, {one.value}, is left out: {one.skipped}" for one in found if one.step is None]
    return replace(report, scaling=found, notes=(*report.notes, *skipped))


def hardware_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = Path("/proc/cpuinfo")
    lines = models.read_text().splitlines() if models.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


class _Progress:
    """How many of the measurements are done, and which one comes next."""

    def __init__(self, display: ProgressDisplay, total: int) -> None:
        self.display, self.total, self.done = display, total, 0

    def tell(self, name: str) -> None:
        self.display.update("measuring", self.done, self.total, name)
        self.done += 1

    def end(self) -> None:
        self.display.update("measuring", self.total, self.total)


@contextmanager
def _memory_told(config: TrainConfig, device: torch.device) -> Iterator[None]:
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
