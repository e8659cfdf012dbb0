"""Which images are in which batch: a pure function of the batch's number, so that any batch can be the first."""

import torch
from jaxtyping import Int
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator


class BatchOrder:
    """Every epoch is a new permutation of the images; each rank has its own part of it; the rest of an epoch is left out.

    A step takes `batches_per_step` batches (gradient accumulation), and an epoch is a whole number of steps.
    """

    def __init__(
        self,
        n_images: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        batches_per_step: int = 1,
        seed: int = 0,
    ) -> None:
        self.n_images, self.batch_size, self.rank, self.world_size = n_images, batch_size, rank, world_size
        self.steps_per_epoch = n_images // (batch_size * world_size * batches_per_step)
        if self.steps_per_epoch < 1:
            raise InputError(
                f"optim.batch_size is {batch_size * world_size * batches_per_step} and there are only {n_images} images: "
                "choose a batch that is no larger than the data set."
            )
        self.batches_per_epoch = self.steps_per_epoch * batches_per_step
        self._seed = seed
        self._cached: tuple[int, Tensor] = (-1, torch.empty(0))

    def epoch_of(self, batch: int) -> int:
        """The epoch that this batch belongs to, from 0."""
        return batch // self.batches_per_epoch

    def indices(self, batch: int) -> Int[Tensor, " batch_size"]:
        """The images of this rank's batch of that number."""
        epoch, within = divmod(batch, self.batches_per_epoch)
        start = (within * self.world_size + self.rank) * self.batch_size
        return self._permutation(epoch)[start : start + self.batch_size]

    def _permutation(self, epoch: int) -> Int[Tensor, " n_images"]:
        if self._cached[0] != epoch:
            order = torch.randperm(self.n_images, generator=seeded_generator("cpu", self._seed, "order", epoch))
            self._cached = (epoch, order)
        return self._cached[1]
