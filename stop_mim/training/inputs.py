"""What a step learns from: the loader's images in this process's batches, each with masks of its own."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from stop_mim.data.bad_images import BadImages
from stop_mim.data.image_source import ImageSource
from stop_mim.data.loader import Loader, open_loader
from stop_mim.data.order import BatchOrder
from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.seeds import seeded_generator
from stop_mim.training.build import build_augment, build_masks
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.feasibility import check_model, split_batch
from stop_mim.training.prefetch import prefetched
from stop_mim.training.step import Batches

MAX_DEFAULT_WORKERS = 8


class StepInputs:
    """The images and masks of every step; what is wrong with batch, model or masks is known before the data are read."""

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
        """The loader of these images for this process, as the configuration asks for it."""
        speed, ranks = self.config.speed, self.ranks
        return open_loader(
            source,
            build_augment(self.config, self._encoder),
            ranks.device,
            bad_images,
            self.config.seed,
            ranks.rank,
            speed.loader,
            workers_for(speed, ranks),
            ranks.processes_on_host,
            progress=partial(display.update, "decoding images"),
            decode=speed.decode,
        )

    def order(self, loader: Loader) -> BatchOrder:
        """Which of the loader's images are in which batch of this process."""
        ranks = self.ranks
        return BatchOrder(
            loader.n_images, self.per_device, ranks.rank, ranks.world_size, self.batches_per_step, self.config.seed
        )

    def draw_masks(self, number: int) -> Masks:
        """The masks of the batch of that number."""
        generator = seeded_generator(self.ranks.device, self.config.seed, "masks", number, self.ranks.rank)
        return self.masks.sample(self.per_device, self.ranks.device, generator)

    def with_masks(self, images: Iterator[Tensor], first_step: int = 0) -> Iterator[Batches]:
        """The batches of every step from the first on, made ahead on a GPU; `images` are those of its batches."""
        return prefetched(self._with_masks(images, first_step), self.ranks.device)

    def _with_masks(self, images: Iterator[Tensor], first_step: int) -> Iterator[Batches]:
        for first in count(first_step * self.batches_per_step, self.batches_per_step):
            yield [(next(images), self.draw_masks(first + one)) for one in range(self.batches_per_step)]


def load_as_before(config: TrainConfig, before: Mapping[str, Any], device: torch.device) -> TrainConfig:
    """With images resident or streamed, and decoded, as in a checkpoint's state: neither memory nor cores choose the crops."""
    if before.get("device") != device.type:
        return config
    left_open = [name for name in ("loader", "decode") if getattr(config.speed, name) == "auto" and name in before]
    return replace(config, speed=replace(config.speed, **{name: before[name] for name in left_open}))


def workers_for(speed: SpeedConfig, ranks: Ranks) -> int:
    """Processes that decode, for each process that trains."""
    cores = (os.cpu_count() or 1) // ranks.processes_on_host
    return min(MAX_DEFAULT_WORKERS, max(1, cores)) if speed.workers is None else speed.workers
