"""The inputs of a pretraining step: batches of images, each with its masks."""

import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from itertools import count, repeat
from pathlib import Path

import torch

from stop_mim.data.augment import RandomCrop
from stop_mim.data.batches import Batch, Batches, Placement
from stop_mim.data.image_source import BadImages, ImageSource
from stop_mim.data.lookahead import prefetched
from stop_mim.data.order import Order, ShuffledOrder
from stop_mim.data.sources import open_source
from stop_mim.data.stored import Progress
from stop_mim.errors import InputError
from stop_mim.masking import RELEASE_IMAGES, Masks, build_masks
from stop_mim.models.build import build_objective
from stop_mim.seeds import seeded_generator
from stop_mim.training.acceleration import require_possible
from stop_mim.training.config import DeviceConfig, TrainConfig, require_data
from stop_mim.training.distributed import Ranks
from stop_mim.training.step import MaskedBatches

MAX_DEFAULT_WORKERS = 8
# Length of an epoch of synthetic images; long enough for the step to be compiled as in a real run.
SYNTHETIC_STEPS_PER_EPOCH = 1000


class StepInputs:
    """The images and masks of every step. Errors in batch, model or masks are raised before any data are read."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.ignored: Mapping[str, int] = {}
        """How many files of the dataset are not images, by extension."""
        self.per_device, self.batches_per_step = split_batch(config, ranks)
        require_possible(config.speed, ranks)
        # On the meta device, without the memory of the weights: a configuration that cannot work raises InputError.
        with torch.device("meta"):
            self._encoder = build_objective(config).encoder
        self.masks = build_masks(config.masks, self._encoder.grid)
        if config.speed.graph and not self.masks.has_fixed_counts:
            raise InputError(
                f"speed.graph is True and masks.compat {config.masks.compat}: those masks change their size from batch to "
                "batch, which a CUDA graph cannot; leave one of the two out."
            )

    def open_images(
        self,
        bad_images_file: Path | None = None,
        progress: Progress | None = None,
        show: Callable[[str], None] | None = None,
    ) -> Batches:
        """Open the images of this process; those that are kept in memory are decoded now.

        The file lists images that cannot be read, whose place the next good ones take; the first of them are shown too.
        """
        config, speed, ranks, encoder = self.config, self.config.speed, self.ranks, self._encoder
        source, size = open_data(config), (self.per_device, config.seed, ranks.rank, ranks.world_size)
        self.ignored = source.ignored
        return Batches(
            source,
            ShuffledOrder(len(source), *size, self.batches_per_step, blocks=source.blocks),
            RandomCrop(config.augment, encoder.image_size, encoder.mean, encoder.std),
            Placement(speed.loader, speed.decode, workers_for(speed, ranks), ranks.processes_on_host),
            ranks.device,
            config.seed,
            bad_images=BadImages(
                source.name, len(source), bad_images_file, float(config.max_bad.rstrip("%")) / 100, show
            ),
            progress=progress,
            replace_bad=True,
        )

    def draw_masks(self, step: int) -> list[Masks]:
        """Return the masks of this process's batches of a step.

        They are drawn for the images of all processes at once and cut into batches, so that they do not depend on the
        number of processes; masks whose size changes are drawn for as many images as share one size.
        """
        ranks, size = self.ranks, self.per_device
        together = self.config.optim.batch_size
        if not self.masks.has_fixed_counts:
            together = min(together, RELEASE_IMAGES)
        firsts = [(one * ranks.world_size + ranks.rank) * size for one in range(self.batches_per_step)]
        drawn = {}
        for group in dict.fromkeys(first // together for first in firsts):
            generator = seeded_generator(ranks.device, self.config.seed, "masks", step, group)
            drawn[group] = self.masks.sample(together, ranks.device, generator)
        return [drawn[first // together][first % together : first % together + size] for first in firsts]

    def starting_at(self, images: "Batches | SyntheticImages", first_step: int) -> Generator[MaskedBatches, None, None]:
        """Yield the inputs of every step from the first on, made ahead on a GPU."""
        # Closed at the end, so that the workers of a run that fails end with it.
        with closing(images.starting_at(first_step * self.batches_per_step)) as batches:
            steps = ([(next(batches).images, masks) for masks in self.draw_masks(step)] for step in count(first_step))
            yield from prefetched(steps, self.ranks.device)


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
        yield from repeat(self._batch)


def open_data(config: TrainConfig) -> ImageSource:
    """Open the dataset of a run."""
    require_data(config)
    return open_source(config.data)


def most_at_once(config: TrainConfig, images: int) -> int:
    """Return how many of the images that a device has in a step it may see at once; a divisor of this number works, too."""
    if config.masks.compat != "release":
        return images
    # Masks of one size are drawn for so many images, and no batch may have masks of two sizes.
    return math.gcd(images, min(config.optim.batch_size, RELEASE_IMAGES))


def split_batch(config: TrainConfig, ranks: Ranks) -> tuple[int, int]:
    """Return the images per batch on one device, and the batches per step."""
    total, given = config.optim.batch_size, config.speed.batch_size_per_device
    if total % (fewest := (given or 1) * ranks.world_size):
        raise InputError(
            f"optim.batch_size is {total}: it must be a multiple of {fewest} (images on a device: {given or 1}, devices: "
            f"{ranks.world_size}); change it, speed.batch_size_per_device or the number of processes."
        )
    per_device = given or most_at_once(config, total // ranks.world_size)
    if config.masks.compat == "release":
        # No batch may have masks of two sizes.
        together = min(total, RELEASE_IMAGES)
        if total % together or (per_device % together and together % per_device):
            raise InputError(
                f"optim.batch_size is {total} with {per_device} images on a device: masks.compat release draws masks for "
                f"{together} images; give a multiple of {together}, or a divisor of it for the device."
            )
        per_device = min(per_device, together)
    return per_device, total // (per_device * ranks.world_size)


def workers_for(speed: DeviceConfig, ranks: Ranks) -> int:
    """Return the number of processes that decode, for each process that trains."""
    cores = (os.cpu_count() or 1) // ranks.processes_on_host
    return min(MAX_DEFAULT_WORKERS, max(1, cores)) if speed.workers is None else speed.workers
