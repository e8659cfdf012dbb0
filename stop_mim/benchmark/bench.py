"""`stop-mim bench`: the training step of a run, its parts, memory and speed, measured on this machine.

The step is the trainer's own: `pretrain.assemble` builds it here as it does for training.
"""

import os
import platform
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from rich.console import Console

from stop_mim.benchmark.comparison import (
    ON_DEVICE,
    Maker,
    MaskedBatch,
    Setting,
    check_comparable,
    encoder_dimensions,
    load_contenders,
    measure_comparison,
)
from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.flops import TokenCounts, step_flops
from stop_mim.benchmark.parts import measure_parts
from stop_mim.benchmark.report import BenchReport, ComparedStep, ScaledStep, print_report, write_report
from stop_mim.benchmark.timing import (
    Work,
    busy_seconds,
    forget_peak,
    lacks_memory,
    matrix_ceiling,
    measure_step,
    peak_memory,
)
from stop_mim.constraints import check_effects
from stop_mim.data.batches import Batch
from stop_mim.data.order import Order, ShuffledOrder
from stop_mim.errors import InputError
from stop_mim.files import require_writable
from stop_mim.seeds import seeded_generator
from stop_mim.training.acceleration import CapturedStep, is_compiled, is_half
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, choose_device
from stop_mim.training.inputs import StepInputs
from stop_mim.training.pretrain import Parts, assemble
from stop_mim.training.run_folder import environment

# Length of an epoch of synthetic images; long enough for the step to be compiled as in a real run.
SYNTHETIC_STEPS_PER_EPOCH = 1000
PROFILED_STEPS = 5
# A comparison comes with a warning if the ceiling moves by more than this factor meanwhile.
STEADY = 1.1
FACTORS, CONTEXT_FACTORS = (0.5, 2.0), (0.5, 1.25)
PARTS_NOTE = (
    "Each part is timed alone, and they need not add up to the step; backward is forward and backward minus forward."
)


def run_bench(
    config: TrainConfig, bench: BenchConfig, recipe: str = "custom", console: Console | None = None
) -> BenchReport:
    """Measure, print the tables and write the JSON file; `bench.images` "auto" means synthetic images."""
    check_effects(config)
    uses_data = bench.images == "data"
    contenders: dict[str, Maker] = {}
    if bench.compare:
        check_comparable(config, uses_data)
        contenders = load_contenders()
    if bench.json is not None:
        require_writable(f"bench.json, {bench.json},", bench.json)
    device = one_device(config)
    with ProgressDisplay(console) as display, _memory_error_named(config, device):

        def show(name: str) -> None:
            display.say(f"measuring: {name}")

        report, setting, batch = measure_run(config, bench, recipe, display, show)
        if contenders:
            report = compare(report, contenders, setting, batch, bench, show)
        if bench.scaling:
            report = scale(report, setting, bench, show)
    print_report(report)
    if bench.json is not None:
        write_report(bench.json, report)
    return report


def open_run(config: TrainConfig, uses_data: bool, display: ProgressDisplay, warn: Callable[[str], None]) -> Parts:
    """Assemble the run as training does, in one process and without a run directory."""
    inputs = StepInputs(config, Ranks(0, 1, 1, one_device(config)))
    images = inputs.open_images(progress=partial(display.update, "decoding images")) if uses_data else None
    return assemble(config, inputs, images or SyntheticImages(inputs), display.say, warn)


class SyntheticImages:
    """One batch of random numbers on the device, again and again."""

    description = "synthetic, on the device"

    def __init__(self, inputs: StepInputs) -> None:
        config, device = inputs.config, inputs.ranks.device
        generator = seeded_generator(device, config.seed, "bench images")
        shape = (inputs.per_device, 3, *config.encoder.image_size)
        images = torch.randn(shape, device=device, generator=generator)
        self._batch = Batch(images, None, torch.arange(inputs.per_device))
        epoch = SYNTHETIC_STEPS_PER_EPOCH * config.optim.batch_size
        self.order: Order = ShuffledOrder(epoch, inputs.per_device, batches_per_step=inputs.batches_per_step)

    def starting_at(self, batch: int = 0) -> Generator[Batch, None, None]:
        """Yield the batch without end."""
        yield from repeat(self._batch)


@contextmanager
def steps_of(run: Parts) -> Iterator[Work]:
    """Give a function that takes the next step of the trainer; the loader ends with the context."""
    with closing(run.trainer.batches(0)) as batches:
        yield lambda: run.trainer.take_step(batches)


def measure_run(
    config: TrainConfig, bench: BenchConfig, recipe: str, display: ProgressDisplay, show: Callable[[str], None]
) -> tuple[BenchReport, Setting, MaskedBatch]:
    """Measure the step and its parts; return the sizes and a batch too, for the comparison."""
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
        measured = replace(measured, peak_memory=peak_memory(device))
        show("host gaps")
        busy = busy_seconds(step, device, PROFILED_STEPS)
    parts = measure_parts(run, uses_data, bench.steps, bench.warmup, show, warn)
    show("ceiling")
    with closing(run.images.starting_at(0)) as images:
        batch = next(images).images, inputs.draw_masks(0)[0]
    counts = TokenCounts.of(batch[1], run.objective.encoder.grid)
    report = BenchReport(
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
        ceilings=(before, matrix_ceiling(device, dtype)),
        notes=tuple(notes),
    )
    return report, Setting(config, device, counts, inputs.per_device, inputs.batches_per_step, run.autocast), batch


def multiplied_in(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the type in which the layers multiply matrices."""
    return torch.bfloat16 if is_half(config.speed.precision, device) else torch.float32


def execution_of(run: Parts) -> str:
    """Describe how the step runs."""
    ways = ["compiled" if is_compiled(run.objective) else "eager"]
    ways += ["captured as a CUDA graph"] if isinstance(run.trainer.step, CapturedStep) else []
    ways += ["recomputed"] if run.config.speed.recompute else []
    return ", ".join(ways)


def compare(
    report: BenchReport,
    contenders: dict[str, Maker],
    setting: Setting,
    batch: MaskedBatch,
    bench: BenchConfig,
    show: Callable[[str], None],
) -> BenchReport:
    """Add other implementations to the report."""
    counts, device = setting.counts, setting.device
    dtype, ceilings = multiplied_in(setting.config, device), list(report.ceilings)
    # On the CPU the memory of one step among others cannot be measured.
    step = report.step if device.type == "cuda" else replace(report.step, peak_memory=None)
    ours = ComparedStep("stop-mim", ON_DEVICE, counts.context, counts.blocks * counts.target, step)
    torch.compiler.reset()

    def show_next(name: str) -> None:
        show(name)
        ceilings.append(matrix_ceiling(device, dtype))

    others, notes = measure_comparison(contenders, setting, batch, bench, show_next)
    ceilings.append(matrix_ceiling(device, dtype))
    low, high = min(ceilings) / 1e12, max(ceilings) / 1e12
    if high > STEADY * low:
        notes.append(
            f"The machine was not steady: its ceiling moved between {low:,.3f} and {high:,.3f} TFLOP/s during the comparison. "
            "Repeat it when nothing else runs."
        )
    return replace(report, comparison=(ours, *others), ceilings=tuple(ceilings), notes=(*report.notes, *notes))


@dataclass(frozen=True)
class Variant:
    """A configuration with one size changed."""

    change: str
    value: str
    config: TrainConfig


def variants(config: TrainConfig, counts: TokenCounts, per_device: int) -> Iterator[Variant]:
    """Yield the configuration itself, then each change."""
    yield Variant("none", "as given", config)
    encoder, masks = config.encoder, config.masks
    for factor in FACTORS:
        patch = encoder.patch_size
        height, width = (max(patch, round(side * factor / patch) * patch) for side in encoder.image_size)
        changed = replace(config, encoder=replace(encoder, image_size=(height, width)))
        yield Variant("image size", f"{height}x{width} pixels", changed)
    for factor in FACTORS:
        images = max(1, round(per_device * factor))
        optim = replace(config.optim, batch_size=images * (config.optim.batch_size // per_device))
        changed = replace(config, optim=optim, speed=replace(config.speed, batch_size_per_device=images))
        yield Variant("batch", f"{images} images", changed)
    for factor in FACTORS:
        layers = max(1, round(encoder_dimensions(encoder).depth * factor))
        changed = replace(config, encoder=replace(encoder, depth=layers))
        yield Variant("depth", f"{layers} layer{'s' if layers > 1 else ''}", changed)
    for factor in CONTEXT_FACTORS:
        tokens = max(1, round(counts.context * factor))
        sizes = {"context_tokens": tokens} if masks.kind == "multiblock" else {"mask_ratio": 1 - tokens / counts.grid}
        changed = replace(config, masks=replace(masks, **sizes))
        yield Variant("context", f"{tokens} of {counts.grid} tokens", changed)


def scale(report: BenchReport, setting: Setting, bench: BenchConfig, show: Callable[[str], None]) -> BenchReport:
    """Add other sizes to the report, or the reason why one cannot be measured."""
    found, config = [], setting.config
    for variant in variants(config, setting.counts, setting.per_device):
        show(f"{variant.change}: {variant.value}")
        found.append(measure_variant(variant, bench))
    skipped = [f"{one.change}, {one.value}, is skipped: {one.skipped}" for one in found if one.step is None]
    return replace(report, scaling=tuple(found), notes=(*report.notes, *skipped))


def measure_variant(variant: Variant, bench: BenchConfig) -> ScaledStep:
    """Measure the step of a variant on synthetic images."""
    device = one_device(variant.config)
    # Compiled code of the last variant is of no use, and would count as a recompilation.
    torch.compiler.reset()
    forget_peak(device)
    try:
        run = open_run(variant.config, False, ProgressDisplay(shown=False), lambda text: None)
        with steps_of(run) as step:
            measured = measure_step(step, device, run.inputs.per_device * run.inputs.batches_per_step, bench)
        return ScaledStep(variant.change, variant.value, measured)
    except InputError as error:
        return ScaledStep(variant.change, variant.value, None, str(error))
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        return ScaledStep(variant.change, variant.value, None, "it does not fit into memory.")


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
