"""A linear probe and nearest neighbours on labelled images while an encoder trains, of which it notices nothing.

They see the target encoder's features and have their own weights, memory, order and crops, all functions of the seed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.data.augment import Augment, AugmentConfig, normalise, resize_batch
from stop_mim.data.bad_images import BadImages
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.images import BadImage
from stop_mim.data.loader import STORED_TO_USED, Progress, StoredImages, common_size, resident_budget
from stop_mim.data.order import BatchOrder
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.models.encoder import Encoder
from stop_mim.models.neighbours import knn_votes
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.checkpoint import Checkpoint, collect_tensors, restore_tensors
from stop_mim.training.config import ProbeConfig

STREAM_BYTES = 4 * 2**30
"""Pixels of labelled images that are kept: of a larger set a part that the seed chooses, 21,845 images for a size of 224.

A fixed number, and not a part of the free memory, so that a resumed run has the same images.
"""

IMAGES_READ_AHEAD = 1024
PREFIX = "probe."


@dataclass(frozen=True)
class LabelledSource:
    """A split of a data set, and the class of each of its images."""

    source: ImageSource
    classes: Int[Tensor, " n"]


@dataclass(frozen=True)
class ProbeData:
    """What a probe learns from and what it is scored on, with the same classes; nothing is decoded yet."""

    train: LabelledSource
    test: LabelledSource
    label: str
    n_classes: int
    fingerprint: str


@dataclass(frozen=True)
class LabelledImages:
    """Decoded images and their classes."""

    stored: StoredImages
    classes: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.classes)


def open_probe_data(name: str, label: str = "auto") -> ProbeData:
    """Both splits of a labelled data set; whatever is missing of splits, labels or classes is an InputError."""
    train, test = open_source(name, "train"), open_source(name, "test")
    contents = [train.fingerprint(), test.fingerprint()]
    # A name without splits is the same data for each.
    if contents[0] == contents[1]:
        raise InputError(f"probe.data is '{name}': it has no test split of its own; give a data set with two splits.")
    label = choose_label(train, label)
    if label not in test.labels:
        raise InputError(f"probe.data is '{name}': its test split has no label '{label}'; give one that has.")
    values = np.unique(train.labels[label])
    if len(values) < 2:
        raise InputError(f"probe.data is '{name}': all its images have the same {label}; give at least two classes.")
    unknown = np.setdiff1d(test.labels[label], values)
    # A split of named classes may number those alone that it has: the same number would be another class.
    if len(unknown) or (label == "class" and train.class_names != test.class_names):
        what = f"the {label} {unknown[0]}, which its train split has not" if len(unknown) else "classes of other names"
        raise InputError(f"probe.data is '{name}': its test split has {what}; give splits of the same classes.")
    classes = [torch.from_numpy(np.searchsorted(values, source.labels[label])) for source in (train, test)]
    fingerprint = digest([*contents, label])
    return ProbeData(
        LabelledSource(train, classes[0]), LabelledSource(test, classes[1]), label, len(values), fingerprint
    )


def choose_label(source: ImageSource, wanted: str) -> str:
    """The label of that name, which must be a whole number; auto is the class, or else the first that there is."""
    usable = [name for name, values in source.labels.items() if np.issubdtype(values.dtype, np.integer)]
    if not usable:
        raise InputError(f"probe.data is '{source.name}': its images have no classes; give a labelled data set.")
    if wanted == "auto":
        return "class" if "class" in usable else usable[0]
    if wanted not in usable:
        raise InputError(f"probe.label is '{wanted}': '{source.name}' can be probed for {' or '.join(usable)}.")
    return wanted


def store_labelled(
    labelled: LabelledSource,
    indices: Int[Tensor, " n"],
    size: tuple[int, int],
    bad_images: BadImages,
    progress: Progress | None = None,
) -> LabelledImages:
    """Decode these images, squashed to one size, each with its class; bad ones are left out with theirs."""
    source, done = labelled.source, 0
    kept: list[int] = []
    pixels = torch.empty(len(indices), 3, *size, dtype=torch.uint8)
    original_sizes = torch.empty(len(indices), 2, dtype=torch.long)

    def read(index: int) -> tuple[Tensor, tuple[int, int]] | BadImage:
        try:
            image = source.read(index)
        except BadImage as error:
            return error
        return resize_batch(image[None], size)[0], (image.shape[1], image.shape[2])

    with ThreadPoolExecutor() as pool:
        for part in indices.split(IMAGES_READ_AHEAD):
            for index, image in zip(part.tolist(), pool.map(read, part.tolist()), strict=True):
                if isinstance(image, BadImage):
                    bad_images.add(str(image))
                    continue
                pixels[len(kept)], original_sizes[len(kept)] = image[0], torch.tensor(image[1])
                kept.append(index)
            done += len(part)
            if progress is not None:
                progress(done, len(indices))
    count = len(kept)
    return LabelledImages(StoredImages(pixels[:count], original_sizes[:count]), labelled.classes[torch.tensor(kept)])


def stored_size(source: ImageSource, used_size: tuple[int, int]) -> tuple[int, int]:
    """The size of all images where they have one that is no larger than is needed, else one for all."""
    squashed = (round(used_size[0] * STORED_TO_USED), round(used_size[1] * STORED_TO_USED))
    common = common_size(source)
    return common if common is not None and common[0] * common[1] <= squashed[0] * squashed[1] else squashed


def choose_images(total: int, most: int, seed: int, split: str) -> Int[Tensor, " n"]:
    """At most so many of the images, chosen by the seed, in their order."""
    order = torch.randperm(total, generator=seeded_generator("cpu", seed, "probe images", split))
    return order[:most].sort().values


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """For the time of the context; afterwards every module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def frozen_features(
    encoder: Encoder, images: Float[Tensor, "batch 3 height width"], autocast: AbstractContextManager[Any]
) -> Float[Tensor, "batch dim"]:
    """Average-pooled features of the last layer."""
    with evaluation_mode(encoder), autocast:
        return encoder.embed(images, 1).float()


class OnlineProbe(nn.Module):
    """Batch-normed features to classes, learned on a stream, and the newest labelled features of it as neighbours."""

    memory_features: Tensor
    memory_classes: Tensor
    seen: Tensor
    loss_sum: Tensor
    batches: Tensor

    def __init__(
        self,
        config: ProbeConfig,
        stream: LabelledImages,
        test: LabelledImages,
        n_classes: int,
        dim: int,
        augment: Augment,
        device: torch.device,
        seed: int,
        crops: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.stream, self.test, self.n_classes = config, stream, test, n_classes
        self.augment, self.device, self.seed, self.crops = augment, device, seed, crops
        self.order = BatchOrder(len(stream), min(config.batch_size, len(stream)), seed=derive_seed(seed, "probe"))
        self.norm = nn.BatchNorm1d(dim, affine=False)
        # Made without its random weights: the global generator belongs to the run.
        self.head: nn.Linear = nn.utils.skip_init(nn.Linear, dim, n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("memory_features", torch.zeros(config.memory, dim))
        self.register_buffer("memory_classes", torch.zeros(config.memory, dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("loss_sum", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.to(device)
        self.optimiser = torch.optim.AdamW(self.head.parameters(), lr=config.lr)

    @property
    def description(self) -> str:
        """How much it learns from, and how much it is scored on."""
        return f"{self.n_classes} classes, {len(self.stream):,} labelled images, scored on {len(self.test):,} others"

    def learn(self, encoder: Encoder, batch: int, autocast: AbstractContextManager[Any]) -> None:
        """Update the head and the memory with the batch of that number; features that are not finite are passed over."""
        images, classes = self._batch(batch)
        features = frozen_features(encoder, images, autocast)
        if not torch.isfinite(features).all():
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
        """Put labelled features in the place of the oldest."""
        size = len(self.memory_classes)
        features, classes = features[-size:], classes[-size:]
        places = (self.seen + torch.arange(len(classes), device=classes.device)) % size
        self.memory_features[places], self.memory_classes[places] = features, classes
        self.seen += len(classes)

    @torch.no_grad()
    def score(self, encoder: Encoder, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """Test accuracies in percent and the mean loss since the last score; nothing before the first batch."""
        filled = min(int(self.seen), len(self.memory_classes))
        if not filled:
            return {}
        self.eval()
        pixels = self.test.stored.pixels.split(self.config.batch_size)
        images = (normalise(part.to(self.device), self.augment.mean, self.augment.std) for part in pixels)
        features = torch.cat([frozen_features(encoder, part, autocast) for part in images])
        memory, classes = self.memory_features[:filled], self.memory_classes[:filled]
        votes = knn_votes(memory, classes, features, self.config.neighbours, self.n_classes)
        loss = (self.loss_sum / self.batches.clamp(min=1)).item()
        self.loss_sum.zero_()
        self.batches.zero_()
        return {
            "probe/linear_top1": self._top1(self.head(self.norm(features))),
            "probe/knn_top1": self._top1(votes),
            "probe/loss": loss,
        }

    def tensors(self) -> dict[str, Tensor]:
        """What it has learned and remembers, for a checkpoint."""
        return {PREFIX + name: tensor for name, tensor in collect_tensors(self, self.optimiser).items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to the state of a checkpoint; one without a probe leaves it new."""
        ours = {name.removeprefix(PREFIX): t for name, t in checkpoint.tensors.items() if name.startswith(PREFIX)}
        if ours:
            restore_tensors(Checkpoint(checkpoint.step, ours, {}), self, self.optimiser)

    def _batch(self, number: int) -> tuple[Float[Tensor, "batch 3 height width"], Int[Tensor, " batch"]]:
        indices = self.order.indices(number)
        stored, generator = self.stream.stored, seeded_generator(self.device, self.seed, "probe crops", number)
        # The images may be in the host's memory, where there was no room for them on the device.
        pixels = stored.pixels[indices.to(stored.pixels.device)].to(self.device)
        sizes = None if stored.original_sizes is None else stored.original_sizes[indices]
        if self.crops:
            images = self.augment(pixels, generator, sizes)
        else:
            images = self.augment.without_crop(resize_batch(pixels, self.augment.size), generator)
        return images, self.stream.classes[indices].to(self.device)

    def _top1(self, scores: Float[Tensor, "n classes"]) -> float:
        return 100 * (scores.argmax(1).cpu() == self.test.classes).double().mean().item()


def make_probe(
    config: ProbeConfig,
    data: ProbeData,
    encoder: Encoder,
    device: torch.device,
    seed: int,
    bad_images_file: Path | None = None,
    progress: Progress | None = None,
) -> OnlineProbe:
    """Decode the images and make a new probe; a class is learned from crops, what a crop may change from whole images."""
    size = stored_size(data.train.source, encoder.image_size)
    most = {"train": max(1, STREAM_BYTES // (3 * size[0] * size[1])), "test": config.test_images}
    sizes = {"train": size, "test": encoder.image_size}
    images = {}
    for split, labelled in (("train", data.train), ("test", data.test)):
        indices = choose_images(len(labelled.source), most[split], seed, split)
        file = None if bad_images_file is None else bad_images_file.with_suffix(f".probe-{split}.txt")
        bad_images = BadImages(labelled.source.name, len(indices), file)
        images[split] = store_labelled(labelled, indices, sizes[split], bad_images, progress)
    stream = _on_device(images["train"], device)
    augment = Augment(AugmentConfig(flip_probability=0.5), encoder.image_size, encoder.mean, encoder.std)
    crops = data.label == "class"
    return OnlineProbe(config, stream, images["test"], data.n_classes, encoder.dim, augment, device, seed, crops)


def _on_device(images: LabelledImages, device: torch.device) -> LabelledImages:
    stored = images.stored
    if device.type == "cpu" or stored.pixels.numel() > resident_budget(device):
        return images
    return LabelledImages(StoredImages(stored.pixels.to(device), stored.original_sizes), images.classes)
