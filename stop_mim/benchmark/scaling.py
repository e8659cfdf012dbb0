"""What other sizes cost: images, batches, depths and numbers of context tokens, one changed at a time."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.findings import ScaledStep
from stop_mim.benchmark.flops import TokenCounts, encoder_dimensions
from stop_mim.benchmark.measurement import measure_step
from stop_mim.benchmark.timing import forget_peak, lacks_memory
from stop_mim.benchmark.workload import Workload, one_device
from stop_mim.errors import InputError
from stop_mim.training.config import TrainConfig

FACTORS = (0.5, 2.0)
CONTEXT_FACTORS = (0.5, 1.25)
VARIANTS = 1 + 3 * len(FACTORS) + len(CONTEXT_FACTORS)


@dataclass(frozen=True)
class Variant:
    """A configuration with one size changed."""

    change: str
    value: str
    config: TrainConfig


def variants(config: TrainConfig, per_device: int, counts: TokenCounts) -> Iterator[Variant]:
    """The configuration itself, then every change."""
    yield Variant("none", "as given", config)
    for factor in FACTORS:
        yield _image_size(config, factor)
    for factor in FACTORS:
        yield _batch(config, factor, per_device)
    for factor in FACTORS:
        depth = max(1, round(encoder_dimensions(config.encoder).depth * factor))
        yield Variant(
            "depth",
            f"{depth} layer{'s' if depth > 1 else ''}",
            replace(config, encoder=replace(config.encoder, depth=depth)),
        )
    for factor in CONTEXT_FACTORS:
        yield _context(config, factor, counts)


def measure_scaling(
    config: TrainConfig,
    bench: BenchConfig,
    per_device: int,
    counts: TokenCounts,
    tell: Callable[[str], None] = lambda name: None,
) -> tuple[ScaledStep, ...]:
    """Every variant measured on synthetic images, or the reason why it cannot be."""
    found = []
    for variant in variants(config, per_device, counts):
        tell(f"{variant.change}: {variant.value}")
        found.append(_measure(variant, bench))
    return tuple(found)


def _measure(variant: Variant, bench: BenchConfig) -> ScaledStep:
    device = one_device(variant.config)
    # What the last variant compiled is of no use to this one, and would count as its recompilation.
    torch.compiler.reset()
    forget_peak(device)
    try:
        with closing(Workload(variant.config, uses_data=False)) as workload:
            step = measure_step(workload.step, device, workload.images_per_step, bench)
        return ScaledStep(variant.change, variant.value, step)
    except InputError as error:
        return ScaledStep(variant.change, variant.value, None, str(error))
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        return ScaledStep(variant.change, variant.value, None, "it does not fit into memory.")


def _image_size(config: TrainConfig, factor: float) -> Variant:
    patch, (height, width) = config.encoder.patch_size, config.encoder.image_size
    size = (_multiple(height * factor, patch), _multiple(width * factor, patch))
    name = f"{size[0]}x{size[1]} pixels"
    return Variant("image size", name, replace(config, encoder=replace(config.encoder, image_size=size)))


def _multiple(length: float, of: int) -> int:
    return max(of, round(length / of) * of)


def _batch(config: TrainConfig, factor: float, per_device: int) -> Variant:
    """Images at a time; the batches of a step stay as many."""
    images = max(1, round(per_device * factor))
    total = images * (config.optim.batch_size // per_device)
    changed = replace(
        config,
        optim=replace(config.optim, batch_size=total),
        speed=replace(config.speed, batch_size_per_device=images),
    )
    return Variant("batch", f"{images} images", changed)


def _context(config: TrainConfig, factor: float, counts: TokenCounts) -> Variant:
    tokens = max(1, round(counts.context * factor))
    if config.masks.kind == "multiblock":
        masks = replace(config.masks, context_tokens=tokens)
    else:
        masks = replace(config.masks, mask_ratio=1 - tokens / counts.grid)
    return Variant("context", f"{tokens} of {counts.grid} tokens", replace(config, masks=masks))
