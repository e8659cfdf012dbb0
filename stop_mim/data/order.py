"""Which images are in which batch: a pure function of the batch number, so that iteration can start anywhere."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator

LEAST_IMAGES_A_BATCH = 2
BLOCKS_TOGETHER = 16
"""Blocks whose images are mixed, where images are read block by block."""
BLOCKS_AHEAD = 32
"""Blocks that are fetched before they are read, at most."""


class Request(NamedTuple):
    """The images of a batch, as positions in the source, and the epoch."""

    epoch: int
    indices: Int[Tensor, " batch"]


class ShuffledOrder:
    """Every epoch is a new permutation of the images; each rank has its part of every batch.

    Args:
        images: the number of images of the source, or the positions of the images to visit.
        batch_size: images a batch on one rank.
        batches_per_step: batches that make one step (gradient accumulation); an epoch is a whole number of steps.
        drop_last: drop the incomplete last batch of an epoch. Otherwise it is kept, or, if a rank would get too few
            images, joined to the batch before.
        blocks: the end of each block of the source, where images must be read block by block: the blocks are shuffled, and
            the images of about 16 successive blocks are mixed.
    """

    length: int | None = None
    """Number of batches; None if endless."""

    def __init__(
        self,
        images: int | Int[np.ndarray, " n"],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        batches_per_step: int = 1,
        drop_last: bool = True,
        blocks: Int[np.ndarray, " blocks"] | None = None,
    ) -> None:
        self.images = _positions(images)
        self._block = None if blocks is None else np.searchsorted(blocks, self.images, side="right")
        self.seed, self.rank, self.world_size, self.drop_last = seed, rank, world_size, drop_last
        n_images = len(self.images)
        self._together = batch_size * world_size
        if drop_last:
            self.batches_per_epoch = n_images // (self._together * batches_per_step) * batches_per_step
            self.batch_size = batch_size
            if not self.batches_per_epoch:
                raise InputError(
                    f"optim.batch_size is {self._together * batches_per_step} and there are only {n_images} images: "
                    "choose a batch that is no larger than the dataset."
                )
        else:
            if n_images < world_size:
                raise InputError(f"There are {n_images} images for {world_size} processes: start fewer processes.")
            whole, rest = divmod(n_images, self._together)
            enough = rest >= min(LEAST_IMAGES_A_BATCH, batch_size) * world_size
            self.batches_per_epoch = max(1, whole + enough)
            last = n_images - (self.batches_per_epoch - 1) * self._together
            self.batch_size = max(min(batch_size, n_images), -(-last // world_size))
        self._cached: tuple[int, Tensor] = (-1, torch.empty(0))

    def epoch_of(self, batch: int) -> int:
        """Return the epoch of a batch, from 0."""
        return batch // self.batches_per_epoch

    def indices(self, batch: int) -> Int[Tensor, " batch"]:
        """Return the images of this rank's batch of that number, as positions in the source."""
        epoch, within = divmod(batch, self.batches_per_epoch)
        start = within * self._together
        takes_rest = not self.drop_last and within == self.batches_per_epoch - 1
        end = len(self.images) if takes_rest else start + self._together
        return self._permutation(epoch)[start:end].tensor_split(self.world_size)[self.rank]

    def _permutation(self, epoch: int) -> Int[Tensor, " n"]:
        if self._cached[0] != epoch:
            generator = seeded_generator("cpu", self.seed, "order", epoch)
            if self._block is None:
                order = torch.randperm(len(self.images), generator=generator)
            else:
                turn = torch.randperm(int(self._block.max()) + 1, generator=generator)
                delay = BLOCKS_TOGETHER * torch.rand(len(self.images), generator=generator, dtype=torch.float64)
                order = (turn[self._block] + delay).argsort(stable=True)
            self._cached = (epoch, torch.from_numpy(self.images)[order])
        return self._cached[1]


class SequentialOrder:
    """All images once, in their order; each rank has every `world_size`-th of them."""

    def __init__(
        self, images: int | Int[np.ndarray, " n"], batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.images, self.batch_size = _positions(images)[rank::world_size], batch_size
        self.batches_per_epoch = -(-len(self.images) // batch_size)
        self.length: int | None = self.batches_per_epoch

    def epoch_of(self, batch: int) -> int:
        return 0

    def indices(self, batch: int) -> Int[Tensor, " batch"]:
        start = batch * self.batch_size
        return torch.from_numpy(self.images[start : start + self.batch_size])


Order = ShuffledOrder | SequentialOrder


def _positions(images: int | Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    return np.arange(images) if isinstance(images, int) else np.asarray(images, dtype=np.int64)
