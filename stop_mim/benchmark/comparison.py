"""Other implementations at the same sizes; they are in the `benchmarks` directory of a clone of the repository."""

import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stop_mim
from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.flops import TokenCounts
from stop_mim.benchmark.report import ComparedStep
from stop_mim.benchmark.timing import forget_peak, lacks_memory, measure_step
from stop_mim.errors import InputError, first_line
from stop_mim.masking import Masks
from stop_mim.models.encoder import SIZES, Dimensions
from stop_mim.training.config import EncoderConfig, TrainConfig

MaskedBatch = tuple[Tensor, Masks]

ON_DEVICE, BEFOREHAND, COLLATOR, WITHIN = "on device", "beforehand", "collator", "in its step"
TOKENS_NOTE = (
    "Masks that are drawn on the device, by a collator or in a step are new in each step, and their time counts; those made "
    "beforehand are ours. An implementation's own masks have other numbers of tokens: compare rows with the same numbers."
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
    """The training step of another implementation."""

    step: Callable[[Sequence[MaskedBatch]], tuple[int, int]]
    """Takes a step on some batches; returns the context and target tokens per image."""
    collate: Callable[[], Masks] | None
    """Returns its own masks for a batch, on the CPU; None: it draws them in its step and ignores the given ones."""
    note: str = ""
    """A remark on its numbers."""


Maker = Callable[[Setting], Contender]


def encoder_dimensions(config: EncoderConfig) -> Dimensions:
    """Return width, depth, heads and MLP ratio of the encoder."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    return replace(SIZES[config.size], **given)


def check_comparable(config: TrainConfig, uses_data: bool) -> None:
    """Raise InputError for a configuration that the other implementations do not have."""
    if config.objective.kind != "ijepa" or config.masks.kind != "multiblock":
        raise InputError(
            f"bench.compare is on, objective.kind is {config.objective.kind} and masks.kind {config.masks.kind}: the other "
            "implementations are I-JEPA with multi-block masks; choose ijepa and multiblock, or leave --bench.compare out."
        )
    if uses_data:
        raise InputError("bench.compare is on and bench.images is data: leave --data out, or --bench.compare.")


def load_contenders(folder: Path = FOLDER) -> dict[str, Maker]:
    """Return the other implementations by name."""
    file = folder / "compare.py"
    spec = importlib.util.spec_from_file_location("stop_mim_compare", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(
            "bench.compare is on and the package does not run from a clone of the repository, where the other implementations "
            "are: clone it and install it with 'pip install -e .', or leave --bench.compare out."
        )
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module.CONTENDERS


def measure_comparison(
    contenders: dict[str, Maker], setting: Setting, batch: MaskedBatch, bench: BenchConfig, show: Callable[[str], None]
) -> tuple[list[ComparedStep], list[str]]:
    """Measure every implementation that can be imported, with the given masks and with its own; return notes too."""
    found: list[ComparedStep] = []
    notes = [TOKENS_NOTE]
    for name, make in contenders.items():
        show(name)
        forget_peak(setting.device)
        try:
            contender = make(setting)
            found += _measure(name, contender, setting, batch, bench)
            notes += [contender.note] if contender.note else []
        except ImportError as error:
            notes.append(f"{name} is skipped: {str(error).rstrip('.')}.")
        except Exception as error:  # Code of others may fail in any way; earlier measurements must not be lost.
            failed = f"it failed with {type(error).__name__}: {first_line(error)}"
            notes.append(f"{name} is skipped: {'it does not fit into memory.' if lacks_memory(error) else failed}")
    return found, notes


def _measure(
    name: str, contender: Contender, setting: Setting, batch: MaskedBatch, bench: BenchConfig
) -> list[ComparedStep]:
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
    return steps


def _to(masks: Masks, device: torch.device) -> Masks:
    return Masks(masks.context.to(device), masks.targets.to(device))
