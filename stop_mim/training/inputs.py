"""What a step learns from: batches of images, each with masks of its own."""

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from stop_mim.data.bad_images import BadImages
from stop_mim.data.batches import Batches, Placement
from stop_mim.data.image_source import ImageSource
from stop_mim.data.lookahead import prefetched
from stop_mim.data.order import Order, ShuffledOrder
from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.seeds import seeded_generator
from stop_mim.training.build import build_augment, build_masks
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.feasibility import check_model, split_batch
from stop_mim.training.step import Batches as StepBatches

MAX_DEFAULT_WORKERS = 8


class Loader(Batches):
    """The images of pretraining."""

    def batches(self, order: Order, first: int) -> Generator[Tensor, None, None]:
        """Yield images without end, beginning with the batch of number `first`."""
        with_indices = self.starting_at(first)
        try:
            for batch in with_indices:
                yield batch.images
        finally:
            with_indices.close()


class StepInputs:
    """The images and masks of every step. Errors in batch, model or masks are raised before any data are read."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.per_device, self.batches_per_step = split_batch(config, ranks)
        self._encoder = check_model(config, ranks)
        self.masks = build_masks(config.masks, self._encoder.grid)
        if config.speed.graph and not self.masks.has_fixed_counts:
            raise InputError(
                f"speed.graph is True and masks.compat {config.masks.compat}: those masks change their size from batch to "
                "batch, which a CUDA graph cannot; leave one of the two out."
            )

    def open_loader(self, source: ImageSource, bad_images: BadImages, display: ProgressDisplay) -> Loader:
        """Open the batches of this process; a bad image is replaced by the next good one."""
        speed, ranks, seed = self.config.speed, self.ranks, self.config.seed
        return Loader(
            source,
            ShuffledOrder(len(source), self.per_device, seed, ranks.rank, ranks.world_size, self.batches_per_step),
            build_augment(self.config, self._encoder),
            Placement(speed.loader, speed.decode, workers_for(speed, ranks), ranks.processes_on_host),
            ranks.device,
            seed,
            bad_images=bad_images,
            progress=partial(display.update, "decoding images"),
            replace_bad=True,
        )

    def order(self, loader: Loader) -> ShuffledOrder:
        """Return the order of the loader's images."""
        assert isinstance(loader.order, ShuffledOrder)
        return loader.order

    def draw_masks(self, number: int) -> Masks:
        """Return the masks of the batch of that number."""
        generator = seeded_generator(self.ranks.device, self.config.seed, "masks", number, self.ranks.rank)
        return self.masks.sample(self.per_device, self.ranks.device, generator)

    def with_masks(self, images: Iterator[Tensor], first_step: int = 0) -> Iterator[StepBatches]:
        """Yield the batches of every step from the first on, made ahead on a GPU; `images` are those of its batches."""
        return prefetched(self._with_masks(images, first_step), self.ranks.device)

    def _with_masks(self, images: Iterator[Tensor], first_step: int) -> Iterator[StepBatches]:
        for first in count(first_step * self.batches_per_step, self.batches_per_step):
            yield [(next(images), self.draw_masks(first + one)) for one in range(self.batches_per_step)]


def choices_of(loader: Batches) -> dict[str, str]:
    """Return what `speed.loader` and `speed.decode` became."""
    return loader.choices


def load_as_before(config: TrainConfig, before: Mapping[str, Any], device: torch.device) -> TrainConfig:
    """Return a config that decodes images as a checkpoint's run did: pixels depend on it by a decoder's rounding."""
    if before.get("device") != device.type:
        return config
    left_open = [name for name in ("loader", "decode") if getattr(config.speed, name) == "auto" and name in before]
    return replace(config, speed=replace(config.speed, **{name: before[name] for name in left_open}))


def workers_for(speed: SpeedConfig, ranks: Ranks) -> int:
    """Return the number of processes that decode, for each process that trains."""
    cores = (os.cpu_count() or 1) // ranks.processes_on_host
    return min(MAX_DEFAULT_WORKERS, max(1, cores)) if speed.workers is None else speed.workers
