"""The same sizes in other implementations, which live in the `benchmarks` folder of a clone of the repository."""

import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stop_mim
from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.findings import ComparedStep
from stop_mim.benchmark.flops import TokenCounts
from stop_mim.benchmark.measurement import measure_step
from stop_mim.benchmark.timing import forget_peak, lacks_memory
from stop_mim.errors import InputError, first_line
from stop_mim.masking import Masks
from stop_mim.training.config import TrainConfig

Batch = tuple[Tensor, Masks]

ON_DEVICE, BEFOREHAND, COLLATOR, WITHIN = "on device", "beforehand", "collator", "in its step"
TOKENS_NOTE = (
    "Masks drawn on the device, by a collator or in a step are new each step, and their time is in it; those made beforehand "
    "are ours. An implementation's own masks have other numbers of tokens: compare rows that have the same."
)
FOLDER = Path(stop_mim.__file__).parents[1] / "benchmarks"


@dataclass(frozen=True)
class Setting:
    """The sizes that every implementation gets."""

    config: TrainConfig
    device: torch.device
    counts: TokenCounts
    per_device: int
    batches_per_step: int
    autocast: AbstractContextManager[Any]


@dataclass(frozen=True)
class Contender:
    """Another implementation's training step."""

    step: Callable[[Sequence[Batch]], tuple[int, int]]
    """A whole step on some batches; gives the context and target tokens that an image had in it."""
    collate: Callable[[], Masks] | None
    """Its own masks for a batch, on the CPU; None: it draws them within its step, and the given ones go unused."""
    note: str = ""
    """What one must know to read its numbers."""


Maker = Callable[[Setting], Contender]


def check_comparable(config: TrainConfig, uses_data: bool) -> None:
    """Refuse what has no counterpart in the others."""
    if config.objective.kind != "ijepa" or config.masks.kind != "multiblock":
        raise InputError(
            f"bench.compare is on, objective.kind is {config.objective.kind} and masks.kind {config.masks.kind}: the others "
            "are I-JEPA with multi-block masks; choose ijepa and multiblock, or leave --bench.compare out."
        )
    if uses_data:
        raise InputError(
            "bench.compare is on and bench.images is data: all are compared on synthetic images; leave --data out, or "
            "--bench.compare."
        )


def load_contenders(folder: Path = FOLDER) -> dict[str, Maker]:
    """The other implementations by name, from the clone that the package runs in."""
    file = folder / "compare.py"
    spec = importlib.util.spec_from_file_location("stop_mim_compare", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(
            "bench.compare is on and the package does not run from a clone of the repository, whose benchmarks folder holds "
            "what is compared: clone it and install it with 'pip install -e .', or leave --bench.compare out."
        )
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module.CONTENDERS


def measure_comparison(
    contenders: dict[str, Maker],
    setting: Setting,
    batch: Batch,
    bench: BenchConfig,
    tell: Callable[[str], None] = lambda name: None,
) -> tuple[list[ComparedStep], list[str]]:
    """All that can be imported, on these images: with these masks, and with their own each step; and what is to be said."""
    found: list[ComparedStep] = []
    notes = [TOKENS_NOTE]
    for name, make in contenders.items():
        tell(name)
        forget_peak(setting.device)
        try:
            steps, note = _measure(name, make(setting), setting, batch, bench)
            found, notes = [*found, *steps], [*notes, *note]
        except ImportError as error:
            notes.append(f"{name} is left out: {str(error).rstrip('.')}.")
        except Exception as error:  # Of somebody else's code; what is measured already must not be lost.
            failed = f"it failed, with {type(error).__name__}: {first_line(error)}"
            notes.append(f"{name} is left out: {'it does not fit into memory.' if lacks_memory(error) else failed}")
    return found, notes


def _measure(
    name: str, contender: Contender, setting: Setting, batch: Batch, bench: BenchConfig
) -> tuple[list[ComparedStep], list[str]]:
    images, given = batch
    ways: dict[str, Callable[[], Masks]] = {WITHIN: lambda: given}
    if contender.collate is not None:
        ways = {BEFOREHAND: lambda: given, COLLATOR: contender.collate}
    steps = []
    for way, masks in ways.items():
        used: list[tuple[int, int]] = []

        def work(masks: Callable[[], Masks] = masks, used: list[tuple[int, int]] = used) -> None:
            batches = [(images, _to(masks(), setting.device)) for _ in range(setting.batches_per_step)]
            used.append(contender.step(batches))

        step = measure_step(work, setting.device, len(images) * setting.batches_per_step, bench)
        context, targets = (round(statistics.mean(numbers)) for numbers in zip(*used, strict=True))
        steps.append(ComparedStep(name, way, context, targets, step))
    return steps, [contender.note] if contender.note else []


def _to(masks: Masks, device: torch.device) -> Masks:
    return Masks(masks.context.to(device), masks.targets.to(device))
