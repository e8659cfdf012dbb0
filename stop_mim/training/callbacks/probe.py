"""The online probe: a linear probe and kNN on labelled images while an encoder trains, without any effect on it.

Both see features of the target encoder, and have their own weights, memory, order and crops, all functions of the seed.
"""

import math
import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.data.augment import STORED_TO_USED, RandomCrop, TestView, View, WholeImage
from stop_mim.data.batches import Batch, Batches, Placement
from stop_mim.data.image_source import BadImages, ImageSource, common_size, digest
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.data.sources import open_source
from stop_mim.data.stored import Progress
from stop_mim.errors import InputError
from stop_mim.models.accuracy import top_accuracy
from stop_mim.models.encoder import Encoder, Images, evaluation_mode
from stop_mim.models.neighbours import knn_votes
from stop_mim.models.objective import Objective
from stop_mim.options import AugmentConfig
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.checkpoint import Checkpoint, collect_tensors, restore_tensors
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, gathered, is_sharded
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer
from stop_mim.training.watch import watch

STREAM_BYTES = 4 * 2**30
"""Pixels of labelled images that are kept; of a larger set, the seed chooses a part: 21,845 images of size 224.

A fixed number, and not a fraction of the free memory, so that a resumed run has the same images.
"""

MAX_WORKERS = 8
PREFIX = "probe."


@dataclass(frozen=True)
class ProbeData:
    """The images that a probe learns from and is scored on, with the same classes; nothing is decoded yet."""

    train: LabelledSet
    test: LabelledSet
    label: str
    n_classes: int
    fingerprint: str


def open_probe_data(name: str, label: str = "auto") -> ProbeData:
    """Open both splits of a labelled dataset; raise InputError if splits, labels or classes are missing."""
    train, test = open_source(name, "train"), open_source(name, "test")
    contents = [train.fingerprint(times=False), test.fingerprint(times=False)]
    # A name without splits is the same data for each.
    if contents[0] == contents[1]:
        raise InputError(
            f"probe.data is '{name}': its train and test splits are the same data; give a dataset with two splits."
        )
    label = choose_label(train, label)
    if label not in test.labels:
        raise InputError(f"probe.data is '{name}': its test split has no label '{label}'; give one that has.")
    values = np.unique(train.labels[label])
    if len(values) < 2:
        raise InputError(f"probe.data is '{name}': all its images have the same {label}; give at least two classes.")
    unknown = np.setdiff1d(test.labels[label], values)
    # A split may number only those classes that it has, so that the same number is another class.
    if len(unknown) or (label == "class" and train.class_names != test.class_names):
        missing = f"the {label} {unknown[0]}, which its train split does not have" if len(unknown) else ""
        what = missing or "classes of other names"
        raise InputError(f"probe.data is '{name}': its test split has {what}; give splits of the same classes.")
    learned, scored = (
        LabelledSet(source, np.searchsorted(values, source.labels[label]), np.arange(len(source)))
        for source in (train, test)
    )
    return ProbeData(learned, scored, label, len(values), digest([*contents, label]))


def choose_label(source: ImageSource, wanted: str) -> str:
    """Return the name of an integer label: the one that is asked for; auto: the class, or else the first."""
    usable = [name for name, values in source.labels.items() if np.issubdtype(values.dtype, np.integer)]
    if not usable:
        reason = source.no_labels and f" ({source.no_labels})"
        raise InputError(f"probe.data is '{source.name}': its images have no classes{reason}; give a labelled dataset.")
    if wanted == "auto":
        return "class" if "class" in usable else usable[0]
    if wanted not in usable:
        raise InputError(f"probe.label is '{wanted}': '{source.name}' can be probed for {' or '.join(usable)}.")
    return wanted


def open_split(
    config: TrainConfig,
    device: torch.device,
    bad_images_file: Path | None,
    progress: Progress | None,
    split: str,
    data: LabelledSet,
    most: int,
    view: View,
    stored: TestView,
) -> Batches:
    """Decode at most `most` images of a split, chosen by the seed; the train split is shuffled.

    `stored` resizes images before they are stored, see `Placement.stored_view`.
    """
    chosen = torch.randperm(len(data), generator=seeded_generator("cpu", config.seed, "probe images", split))[:most]
    data, own_seed = data.part(chosen.sort().values.numpy()), derive_seed(config.seed, "probe")
    indices, size = data.indices, min(config.probe.batch_size, len(data))
    order = ShuffledOrder(indices, size, own_seed) if split == "train" else SequentialOrder(indices, size)
    file = None if bad_images_file is None else bad_images_file.with_suffix(f".probe-{split}.txt")
    bad_images = BadImages(data.source.name, len(data), file)
    placement = Placement("resident", "cpu", min(MAX_WORKERS, os.cpu_count() or 1), stored_view=stored)
    return Batches(data.source, order, view, placement, device, own_seed, data.labels, bad_images, progress)


class OnlineProbe(nn.Module):
    """A linear head on batch-normed features, learned on a stream of batches, and kNN among the newest of them.

    A class is learned from crops; labels that a crop may change, such as counts, from whole images.
    """

    memory_features: Tensor
    memory_classes: Tensor
    seen: Tensor
    loss_sum: Tensor
    batches: Tensor

    def __init__(
        self,
        config: TrainConfig,
        data: ProbeData,
        encoder: Encoder,
        autocast: AbstractContextManager[Any],
        device: torch.device,
        bad_images_file: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.config, self.n_classes = config.probe, data.n_classes
        # In a tuple, so that the encoder does not become a part of this module.
        self._encoder, self._autocast = (encoder,), autocast
        kind = RandomCrop if data.label == "class" else WholeImage
        view = kind(AugmentConfig(flip_probability=0.5), encoder.image_size, encoder.mean, encoder.std)
        whole = TestView(encoder.image_size, None, encoder.mean, encoder.std)
        height, width = encoder.image_size
        if kind is RandomCrop:
            height, width = round(height * STORED_TO_USED), round(width * STORED_TO_USED)
        bytes_per_image = 3 * min(height * width, math.prod(common_size(data.train.source) or (height, width)))
        opened = partial(open_split, config, device, bad_images_file, progress)
        most = max(1, STREAM_BYTES // bytes_per_image)
        self.stream = opened("train", data.train, most, view, TestView((height, width)))
        self.test = opened("test", data.test, config.probe.test_images, whole, whole)
        self._reading: Generator[Batch, None, None] | None = None
        self.norm = nn.BatchNorm1d(encoder.dim, affine=False)
        # Without random weights: the global generator belongs to the run.
        self.head: nn.Linear = nn.utils.skip_init(nn.Linear, encoder.dim, data.n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("memory_features", torch.zeros(config.probe.memory, encoder.dim))
        self.register_buffer("memory_classes", torch.zeros(config.probe.memory, dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("loss_sum", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.to(device)
        self.optimiser = torch.optim.AdamW(self.head.parameters(), lr=config.probe.lr)

    @torch.no_grad()
    def features(self, images: Images) -> Float[Tensor, "batch dim"]:
        """Return average-pooled features of the last layer."""
        (encoder,) = self._encoder
        with evaluation_mode(encoder), self._autocast:
            return encoder.embed(images).float()

    def learn(self, number: int) -> None:
        """Update head and memory with the next batch, of that number; features that are not finite are skipped."""
        if self._reading is None:
            self._reading = self.stream.starting_at(number)
        images, classes, _ = next(self._reading)
        features = self.features(images)
        # Batch normalisation needs two images; a batch loses those that cannot be read.
        if classes is None or len(classes) < 2 or not torch.isfinite(features).all():
            return
        self.train()
        loss = F.cross_entropy(self.head(self.norm(features)), classes)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.loss_sum += loss.detach()
        self.batches += 1
        self.remember(features, classes)

    def remember(self, features: Float[Tensor, "n dim"], classes: Int[Tensor, " n"]) -> None:
        """Replace the oldest features of the memory."""
        size = len(self.memory_classes)
        features, classes = features[-size:], classes[-size:]
        places = (self.seen + torch.arange(len(classes), device=classes.device)) % size
        self.memory_features[places], self.memory_classes[places] = features, classes
        self.seen += len(classes)

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Return test accuracies in percent and the mean loss since the last score; nothing before the first batch."""
        filled = min(int(self.seen), len(self.memory_classes))
        if not filled:
            return {}
        self.eval()
        parts, labels = [], []
        for images, found, _ in self.test.starting_at():
            assert found is not None
            parts.append(self.features(images))
            labels.append(found)
        features, truth = torch.cat(parts), torch.cat(labels)
        memory, classes = self.memory_features[:filled], self.memory_classes[:filled]
        (votes,) = knn_votes([memory], classes, features, [self.config.neighbours], self.n_classes).values()
        loss = (self.loss_sum / self.batches.clamp(min=1)).item()
        self.loss_sum.zero_()
        self.batches.zero_()
        return {
            "probe/linear_top1": top_accuracy(self.head(self.norm(features)), truth),
            "probe/knn_top1": top_accuracy(votes, truth),
            "probe/loss": loss,
        }


class RunProbe(Callback):
    """Gives the probe a batch every few steps, and scores it; only the main process has a probe."""

    name = "probe"

    def __init__(
        self,
        config: TrainConfig,
        data: ProbeData,
        objective: Objective,
        autocast: AbstractContextManager[Any],
        ranks: Ranks,
        folder: RunFolder,
        display: ProgressDisplay,
    ) -> None:
        self.config, self.fingerprint, self.display = config.probe, data.fingerprint, display
        self.objective = objective
        # All processes gather the weights of a sharded model; the main one uses them.
        self.on_every_rank = is_sharded(objective)
        self.probe: OnlineProbe | None = None
        watch.mark("start-up, decoding labelled images")
        if ranks.is_main:
            file, progress = folder.bad_images_file, partial(display.update, "decoding labelled images")
            self.probe = OnlineProbe(config, data, objective.frozen, autocast, ranks.device, file, progress)

    def start(self, trainer: Trainer) -> None:
        if (probe := self.probe) is not None:
            counts = f"{probe.stream.n_images:,} labelled images, scored on {probe.test.n_images:,} others"
            self.display.say(f"probe      {self.config.data}; {probe.n_classes} classes, {counts}")

    def needs_outcomes(self, step: int) -> bool:
        return step % self.config.score_every_steps == 0

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        step = trainer.done
        learns, scores = step % self.config.every_steps == 0, self.needs_outcomes(step) or step == trainer.total_steps
        if not (learns or scores):
            return
        with gathered(self.objective):
            if self.probe is not None and learns:
                self.probe.learn(step // self.config.every_steps)
            if self.probe is not None and scores:
                trainer.measurements |= self.probe.score()

    def state(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def tensors(self) -> dict[str, Tensor]:
        if self.probe is None:
            return {}
        return {PREFIX + name: tensor for name, tensor in collect_tensors(self.probe, self.probe.optimiser).items()}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Continue the probe; if the checkpoint's probe had other images, a new probe starts."""
        if self.probe is None:
            return
        if state == self.state():
            ours = {name.removeprefix(PREFIX): t for name, t in tensors.items() if name.startswith(PREFIX)}
            restore_tensors(Checkpoint(0, ours, {}), self.probe, self.probe.optimiser)
        else:
            self.display.warn(f"The checkpoint has no probe of '{self.config.data}' as it is now: a new probe starts.")
