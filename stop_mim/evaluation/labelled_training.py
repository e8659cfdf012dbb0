"""Training on labelled images with the `Trainer`, for linear-sgd and fine-tuning: batches, a state file, test scores."""

import copy
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.data.augment import Retouch
from stop_mim.data.batches import Batch, Batches, Placement
from stop_mim.data.image_source import ImageSource
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.data.stored import Progress
from stop_mim.errors import InputError
from stop_mim.evaluation.features import IMAGES_AT_A_TIME
from stop_mim.evaluation.protocols import Protocol
from stop_mim.evaluation.task import TOP
from stop_mim.models.accuracy import top_hits
from stop_mim.models.encoder import FrozenEncoder, Images
from stop_mim.options import AugmentConfig
from stop_mim.seeds import derive_seed
from stop_mim.training.callbacks.checkpoint import SaveCheckpoint
from stop_mim.training.callbacks.progress import ShowProgress
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks, any_rank, broadcast, reduce_mean
from stop_mim.training.inputs import workers_for
from stop_mim.training.step import Outcome
from stop_mim.training.trainer import Callback, Trainer
from stop_mim.training.watch import watch

# Learning rates are for batches of this size, and scaled linearly.
LR_IMAGES = 256


@dataclass(frozen=True)
class Conditions:
    """The protocol, augmentation, seed, processes and device of a training.

    `speed` gives precision, batch_size_per_device, loader, decode and workers; `retouch` changes each training image.
    """

    protocol: Protocol
    augment: AugmentConfig
    seed: int
    ranks: Ranks
    speed: DeviceConfig
    retouch: Retouch | None = None


class SaveTraining(SaveCheckpoint):
    """Saves the state of a training, with the unreadable images that all processes have found."""

    on_every_rank = True

    def __init__(self, path: Path, training: "LabelledTraining") -> None:
        super().__init__(path, training.steps_per_epoch, run={})
        self.training = training

    def save(self, trainer: Trainer) -> None:
        self.run["unreadable"] = sorted(self.training.all_unreadable(self.training.used.source))
        if trainer.ranks.is_main:
            super().save(trainer)


class LabelledTraining(Callback, ABC):
    """Trains classifiers on labelled images: the step of a `Trainer`, and the callback that saves its state.

    Args:
        model: the parameters that are trained, on the device.
        encoder: gives size and normalisation of the images.
        used: the training images.
        remedy: what to do if the loss is not finite.
    """

    name = "training"
    on_every_rank = True
    least_images: ClassVar[int] = 1
    """A batch that has fewer images in a process, because some cannot be read, is skipped."""
    classifiers: int = 1
    """How many classifiers are trained side by side."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        encoder: FrozenEncoder,
        used: LabelledSet,
        epochs: int,
        batch_size: int,
        conditions: Conditions,
        remedy: str,
    ) -> None:
        self.model, self.optimiser, self.encoder, self.used = model, optimiser, encoder, used
        self.epochs, self.batch_size, self.conditions, self.remedy = epochs, batch_size, conditions, remedy
        self.ranks, self.speed, self.seed = conditions.ranks, conditions.speed, conditions.seed
        rank, count = self.ranks.rank, self.ranks.world_size
        if batch_size % count:
            raise InputError(f"batch_size is {batch_size}: it must be a multiple of {count}, the number of processes.")
        blocks = used.source.blocks
        self.order = ShuffledOrder(used.indices, batch_size // count, self.seed, rank, count, 1, False, blocks)
        self.steps_per_epoch = self.order.batches_per_epoch
        self.unreadable: dict[ImageSource, set[int]] = {}
        """Images that could not be read and are left out, of training and of scores, by their source."""

    @abstractmethod
    def lr(self, step: int) -> float:
        """Return the learning rate of a step, which `update` gets."""

    @abstractmethod
    def update(self, images: Images, labels: Int[Tensor, " batch"], lr: float, seed: int) -> Outcome:
        """Take a step."""

    @abstractmethod
    def predict(self, images: Images) -> Float[Tensor, "heads batch classes"]:
        """Return the class scores of each of the classifiers."""

    def __call__(self, batch: Batch, lr: float, seed: int) -> Outcome:
        """Take a step, unless a process has too few images."""
        assert batch.labels is not None
        if any_rank(len(batch.labels) < self.least_images, self.ranks):
            return torch.tensor([math.nan, 0.0, 1.0], device=self.ranks.device)
        rank = self.ranks.rank
        return self.update(batch.images, batch.labels, lr, derive_seed(seed, "rank", rank) if rank else seed)

    @cached_property
    def _images(self) -> Batches:
        view = self.conditions.protocol.training_view(self.encoder, self.conditions.augment)
        view.retouch = self.conditions.retouch
        speed, ranks, data = self.speed, self.ranks, self.used
        placement = Placement(speed.loader, speed.decode, workers_for(speed, ranks), ranks.processes_on_host)
        return Batches(data.source, self.order, view, placement, ranks.device, self.seed, data.labels)

    def batches(self, first: int) -> Generator[Batch, None, None]:
        """Yield this process's part of the batches, from a step on."""
        # The reader is some batches ahead, and an order keeps the permutation of one epoch.
        order = copy.copy(self.order)
        with closing(self._images.starting_at(first)) as found:
            for number, batch in enumerate(found, first):
                wanted = order.indices(number)
                if len(batch.indices) < len(wanted):
                    self._note_unreadable(self.used.source, wanted.tolist(), batch.indices.tolist())
                yield batch

    def _note_unreadable(self, source: ImageSource, wanted: Iterable[int], read: Iterable[int]) -> None:
        self.unreadable.setdefault(source, set()).update({*wanted} - {*read})

    def all_unreadable(self, source: ImageSource) -> set[int]:
        """Return the unreadable images of a source that all processes have found; all of them must ask for it."""
        known = self.unreadable.setdefault(source, set())
        if self.ranks.world_size > 1:
            found = torch.zeros(len(source), device=self.ranks.device)
            found[torch.tensor([*known], dtype=torch.long)] = 1
            known.update(reduce_mean(found, self.ranks).nonzero()[:, 0].tolist())
        return known

    def train(self, state_file: Path, progress: Progress | None = None) -> None:
        """Train to the end, resuming from the state file if there is one; the state is saved there after each epoch.

        After SIGTERM or Ctrl-C the last step is saved, and SystemExit or KeyboardInterrupt raised.
        """
        shown = [] if progress is None else [ShowProgress(lambda done, total, _: progress(done, total))]
        trainer = Trainer(
            self,
            self.batches,
            self.lr,
            self.epochs * self.steps_per_epoch,
            self.model,
            self.optimiser,
            [self, *shown, SaveTraining(state_file, self)],
            self.ranks,
            self.seed,
            warn=lambda text: None,
            max_not_finite=1,
            remedy=self.remedy,
        )
        if broadcast(state_file.exists(), self.ranks):
            try:
                saved = read_checkpoint(state_file)
                trainer.restore(saved)
            except InputError as error:
                raise InputError(
                    f"The state {state_file} of an interrupted evaluation is damaged: delete it."
                ) from error
            self.unreadable[self.used.source] = {*saved.state["run"].get("unreadable", [])}
        if trainer.done < trainer.total_steps:
            trainer.run()
        if trainer.interrupted_by == "SIGTERM":
            raise SystemExit(128 + signal.SIGTERM)
        if trainer.interrupted_by is not None:
            raise KeyboardInterrupt

    @torch.no_grad()
    def score(self, data: LabelledSet) -> tuple[list[list[float]], int]:
        """Return each head's top-1 and top-5 in percent, and the number of readable images; each process scores a part."""
        self.model.eval()
        ranks, speed = self.ranks, self.speed
        at_a_time = speed.batch_size_per_device or IMAGES_AT_A_TIME
        order = SequentialOrder(data.indices, at_a_time, ranks.rank, ranks.world_size)
        view = self.conditions.protocol.test_view_of(self.encoder)
        placement = Placement(workers=workers_for(speed, ranks))
        batches = Batches(data.source, order, view, placement, ranks.device, labels=data.labels)
        # A process may have no image.
        right = torch.zeros(self.classifiers, len(TOP), dtype=torch.float64, device=ranks.device)
        count, read = right.new_zeros(()), list[int]()
        with closing(batches.starting_at()) as found:
            for images, labels, indices in found:
                assert labels is not None
                watch.moves()
                right += top_hits(self.predict(images), labels, TOP).double().sum(1)
                count += len(labels)
                read += indices.tolist()
        self._note_unreadable(data.source, order.images.tolist(), read)
        self.all_unreadable(data.source)
        right, count = reduce_mean(right, ranks), reduce_mean(count, ranks)
        return (100 * right / count).float().tolist(), round(count.item() * ranks.world_size)
