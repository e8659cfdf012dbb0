"""The inputs of a pretraining step: batches of images, each with its masks."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from stop_mim.data.augment import RandomCrop
from stop_mim.data.bad_images import BadImages
from stop_mim.data.batches import Batch, Batches, Placement
from stop_mim.data.image_source import ImageSource
from stop_mim.data.lookahead import prefetched
from stop_mim.data.order import ShuffledOrder
from stop_mim.errors import InputError
from stop_mim.masking import Masks, build_masks
from stop_mim.models.build import build_objective
from stop_mim.models.encoder import Encoder
from stop_mim.seeds import seeded_generator
from stop_mim.training.acceleration import require_possible
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.step import Batches as StepBatches

MAX_DEFAULT_WORKERS = 8


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

    def open_batches(self, source: ImageSource, bad_images: BadImages, display: ProgressDisplay) -> Batches:
        """Open the images of this process; a bad image is replaced by the next good one."""
        speed, ranks, seed, encoder = self.config.speed, self.ranks, self.config.seed, self._encoder
        return Batches(
            source,
            ShuffledOrder(len(source), self.per_device, seed, ranks.rank, ranks.world_size, self.batches_per_step),
            RandomCrop(self.config.augment, encoder.image_size, encoder.mean, encoder.std),
            Placement(speed.loader, speed.decode, workers_for(speed, ranks), ranks.processes_on_host),
            ranks.device,
            seed,
            bad_images=bad_images,
            progress=partial(display.update, "decoding images"),
            replace_bad=True,
        )

    def draw_masks(self, number: int) -> Masks:
        """Return the masks of the batch of that number."""
        generator = seeded_generator(self.ranks.device, self.config.seed, "masks", number, self.ranks.rank)
        return self.masks.sample(self.per_device, self.ranks.device, generator)

    def with_masks(self, images: Iterator[Batch], first_step: int = 0) -> Iterator[StepBatches]:
        """Yield the batches of every step from the first on, made ahead on a GPU; `images` are those of its batches."""
        return prefetched(self._with_masks(images, first_step), self.ranks.device)

    def _with_masks(self, images: Iterator[Batch], first_step: int) -> Iterator[StepBatches]:
        for first in count(first_step * self.batches_per_step, self.batches_per_step):
            yield [(next(images).images, self.draw_masks(first + one)) for one in range(self.batches_per_step)]


def check_model(config: TrainConfig, ranks: Ranks) -> Encoder:
    """Build the model on the meta device, without its memory; a configuration that cannot work raises InputError."""
    with torch.device("meta"):
        objective = build_objective(config)
    require_possible(config.speed, ranks)
    return objective.encoder


def split_batch(config: TrainConfig, ranks: Ranks) -> tuple[int, int]:
    """Return the images per batch on one device, and the batches per step."""
    total = config.optim.batch_size
    per_device = config.speed.batch_size_per_device or max(1, total // ranks.world_size)
    if total % (per_device * ranks.world_size):
        raise InputError(
            f"optim.batch_size is {total}: it must be a multiple of {per_device * ranks.world_size} "
            f"({per_device} images on each of {ranks.world_size} devices)."
        )
    return per_device, total // (per_device * ranks.world_size)


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
