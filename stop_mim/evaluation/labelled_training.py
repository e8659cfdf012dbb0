"""Training on labelled images, shared by linear-sgd and fine-tuning: epochs, batches, a state to resume from, scores."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.data.augment import Augment, AugmentConfig, normalise
from stop_mim.data.cache import cache_folder, require_writable_cache
from stop_mim.data.image_source import digest
from stop_mim.data.labelled import LabelledBatches, LabelledSet, labelled_views, reading_mode
from stop_mim.data.loader import Progress
from stop_mim.errors import InputError
from stop_mim.evaluation.features import IMAGES_AT_A_TIME, centre_view
from stop_mim.evaluation.protocols import TestView, TrainView
from stop_mim.results import Score
from stop_mim.evaluation.task import Task
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.training.checkpoint import (
    Checkpoint,
    collect_tensors,
    read_checkpoint,
    restore_tensors,
    save_checkpoint,
)
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks, any_rank, broadcast, reduce_mean, wait_for_all
from stop_mim.training.inputs import workers_for

# Learning rates are for batches of this size, and scaled linearly.
LR_IMAGES = 256
TOP = (1, 5)


@dataclass(frozen=True)
class Conditions:
    """The views, seed, processes and device of a training.

    Of `speed`, precision, batch_size_per_device, loader and workers count.
    """

    train_view: TrainView
    test_view: TestView
    augment: AugmentConfig
    seed: int
    ranks: Ranks
    speed: SpeedConfig


class LabelledTraining:
    """A classifier of labelled images in training.

    Args:
        model: the parameters that are trained, on the device.
        encoder: gives size and normalisation of the images.
        used: the training images.
    """

    least_images: ClassVar[int] = 1
    """A batch that has fewer images in a process, because some cannot be read, is skipped."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        encoder: FrozenEncoder,
        used: LabelledSet,
        epochs: int,
        batch_size: int,
        conditions: Conditions,
    ) -> None:
        self.model, self.optimiser, self.encoder, self.used = model, optimiser, encoder, used
        self.epochs, self.batch_size, self.conditions = epochs, batch_size, conditions
        self.ranks, self.speed, self.seed = conditions.ranks, conditions.speed, conditions.seed

    def step(self, step: int, images: Float[Tensor, "batch 3 h w"], labels: Int[Tensor, " batch"]) -> None:
        """Take a step."""
        raise NotImplementedError

    def set_lr(self, step: int, steps_per_epoch: int) -> None:
        """Set the learning rates of a step."""
        raise NotImplementedError

    def predict(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "heads batch classes"]:
        """Return the class scores of each of the classifiers."""
        raise NotImplementedError

    def start(self, batches: LabelledBatches) -> None:
        """Prepare before the first epoch, also of a resumed training."""

    def end_epoch(self, epochs: int) -> None:
        """Called when `epochs` epochs are done."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and values that a resumed training needs besides model and optimiser."""
        return {}, {}

    def restore(self, saved: Checkpoint) -> None:
        """Take over what `state` returned."""

    def train(self, state_file: Path | None = None, progress: Progress | None = None) -> None:
        """Train from where the state file is to the last epoch; each epoch is saved there."""
        saved = self._read(state_file)
        if saved is not None:
            restore_tensors(saved, self.model, self.optimiser)
            self.restore(saved)
        first = 0 if saved is None else saved.step
        if first == self.epochs:
            return
        batches = self.batches()
        self.start(batches)
        for epoch in range(first, self.epochs):
            self._train_epoch(epoch, batches, progress)
            self.end_epoch(epoch + 1)
            if state_file is not None and self.ranks.is_main:
                tensors, values = self.state()
                tensors |= collect_tensors(self.model, self.optimiser)
                save_checkpoint(Checkpoint(epoch + 1, tensors, values), state_file)
            wait_for_all(self.ranks)

    def _read(self, state_file: Path | None) -> Checkpoint | None:
        if state_file is None or not broadcast(state_file.exists(), self.ranks):
            return None
        try:
            return read_checkpoint(state_file)
        except InputError as error:
            raise InputError(f"The state {state_file} of an interrupted evaluation is damaged: delete it.") from error

    def _train_epoch(self, epoch: int, batches: LabelledBatches, progress: Progress | None) -> None:
        with closing(batches.epoch(epoch)) as labelled:
            for step, (images, labels) in enumerate(labelled, start=epoch * len(batches)):
                self.set_lr(step, len(batches))
                if not any_rank(len(labels) < self.least_images, self.ranks):
                    self.step(step, images, labels)
                if progress is not None:
                    progress(step + 1, self.epochs * len(batches))

    def batches(self) -> LabelledBatches:
        """Return this process's part of the batches."""
        conditions, encoder, ranks = self.conditions, self.encoder, self.ranks
        if self.batch_size % ranks.world_size:
            raise InputError(
                f"batch_size is {self.batch_size}: it must be a multiple of {ranks.world_size}, the number of processes."
            )
        mode = self.speed.loader
        if mode == "auto":
            mode = broadcast(reading_mode(self.used, ranks.device, ranks.processes_on_host), ranks)
        return LabelledBatches(
            self.used,
            Augment(conditions.augment, encoder.image_size, encoder.mean, encoder.std),
            ranks.device,
            self.batch_size // ranks.world_size,
            self.seed,
            ranks.rank,
            ranks.world_size,
            mode,
            workers_for(self.speed, ranks),
            conditions.train_view == "random_resized_crop",
        )

    @torch.no_grad()
    def score(self, data: LabelledSet) -> Float[Tensor, "heads top"]:
        """Return top-1 and top-5 accuracies in percent; each process scores a part of the readable images."""
        self.model.eval()
        encoder, ranks = self.encoder, self.ranks
        mine = slice(ranks.rank, None, ranks.world_size)
        labels = torch.from_numpy(data.classes[mine])
        right: Tensor | float = 0.0
        count = torch.zeros((), dtype=torch.float64, device=ranks.device)
        views = labelled_views(
            data.source,
            data.indices[mine],
            encoder.image_size,
            centre_view(self.conditions.test_view, encoder.image_size).resize_to,
            ranks.device,
            self.speed.batch_size_per_device or IMAGES_AT_A_TIME,
            workers_for(self.speed, ranks),
        )
        with closing(views):
            for positions, pixels in views:
                logits = self.predict(normalise(pixels, encoder.mean, encoder.std))
                right = right + _hits(logits, labels[positions].to(ranks.device)).sum(1)
                count += len(positions)
        assert isinstance(right, Tensor)
        return (100 * reduce_mean(right, ranks) / reduce_mean(count, ranks)).float()


def _hits(
    logits: Float[Tensor, "heads batch classes"], labels: Int[Tensor, " batch"]
) -> Float[Tensor, "heads batch top"]:
    ranked = logits.topk(min(max(TOP), logits.shape[2]), dim=2).indices == labels[:, None]
    hits = torch.stack([ranked[:, :, :top].any(2) for top in TOP], dim=2)
    # A head whose scores are not finite is never right.
    return (hits & torch.isfinite(logits).all(2, keepdim=True)).double()


class TrainingTask(Task):
    """A task that trains on images; a state file in the cache lets it resume where it was interrupted."""

    trains = True

    def training(self) -> LabelledTraining:
        """Return the training, not yet started."""
        raise NotImplementedError

    def results(self, training: LabelledTraining) -> Iterator[Score]:
        """Yield the scores of what was trained."""
        raise NotImplementedError

    def train_set(self) -> LabelledSet:
        """Return the training images."""
        return self.data.train

    def augmentation(self) -> AugmentConfig:
        """Return the augmentation of the training images."""
        return AugmentConfig(crop_scale=(0.08, 1.0), flip_probability=0.5)

    def conditions(self) -> Conditions:
        """Return the conditions of the training."""
        protocol, ranks = self.subject.protocol(self.data), self.subject.ranks
        views = protocol.train_view, protocol.test_view
        return Conditions(*views, self.augmentation(), self.config.seed, ranks, self.config.speed)

    def run(self) -> Iterator[Score]:
        """Train, or resume, and yield the scores."""
        subject = self.subject
        identity = [subject.fingerprint, subject.encoder.image_size, self.name, self.train_set().fingerprint()]
        key = digest([*identity, self.data.test.fingerprint(), self.config.seed, self.settings()])
        state_file = cache_folder() / "evaluations" / f"{key}.safetensors"
        require_writable_cache(state_file.parent)
        training = self.training()
        training.train(state_file, self.progress)
        yield from self.results(training)
        if subject.ranks.is_main:
            state_file.unlink(missing_ok=True)
