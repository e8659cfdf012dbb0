"""Labelled sets of images, and what evaluations still read them with.

`LabelledBatches` and `labelled_views` are thin wrappers around `Batches`.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from stop_mim.data.augment import RandomCrop, TestView, WholeImage
from stop_mim.data.bad_images import BadImages
from stop_mim.data.batches import Batches, LoaderMode, Placement, choose_mode
from stop_mim.data.image_source import ImageSource, common_size, digest
from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.data.stored import Progress
from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator

LabelledBatch = tuple[Float[Tensor, "batch 3 height width"], Int[Tensor, " batch"]]


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Some images of a source, and the class of each."""

    source: ImageSource
    labels: np.ndarray
    """The class of every image of the source, from 0; -1 where an image outside the set has none."""
    indices: np.ndarray
    """Which images of the source belong to the set."""

    def __post_init__(self) -> None:
        name, total = self.source.name, len(self.source)
        if self.labels.shape != (total,) or self.labels.dtype.kind not in "iu":
            kind = f"{self.labels.dtype} labels of shape {self.labels.shape}"
            raise InputError(f"'{name}' has {total} images and {kind}: give every image one integer.")
        _check_indices(self.source, self.indices)
        if not len(self.indices):
            raise InputError(f"The chosen part of '{name}' is empty: choose at least one image.")
        if len(np.unique(self.indices)) < len(self.indices):
            raise InputError(f"The chosen part of '{name}' holds an image twice: choose every image once.")
        missing = self.indices[self.labels[self.indices] < 0]
        if len(missing):
            which = f"{len(missing)} of the {len(self.indices)} chosen images of '{name}'"
            raise InputError(f"{which} have no label, such as {self.source.describe(int(missing[0]))}: leave them out.")

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def classes(self) -> np.ndarray:
        """The class of each image of the set, in the order of its indices."""
        return self.labels[self.indices].astype(np.int64)

    def part(self, positions: np.ndarray) -> "LabelledSet":
        """The images at these places of the set, as a set of their own."""
        return replace(self, indices=self.indices[positions])

    def fingerprint(self) -> str:
        """A short hexadecimal name: it changes with the images, their labels or the choice of them."""
        return digest([self.source.fingerprint(), self.indices.astype(np.int64).tobytes(), self.classes.tobytes()])


def _check_indices(source: ImageSource, indices: np.ndarray) -> None:
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise InputError(f"The indices are {indices.dtype} of shape {indices.shape}: give a list of integers.")
    wrong = indices[(indices < 0) | (indices >= len(source))]
    if len(wrong):
        last = len(source) - 1
        raise InputError(f"There is no image {wrong[0]} in '{source.name}': choose from 0 to {last}.")


def hold_out(data: LabelledSet, part: float, most: int, seed: int) -> tuple[LabelledSet, LabelledSet]:
    """Split off a part, of every class alike; an image of each class always remains. Returns the rest and the part."""
    classes = data.classes
    shuffled = torch.randperm(len(data), generator=seeded_generator("cpu", seed, "held out")).numpy()
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    first_of_class = np.diff(classes[by_class], prepend=-1) != 0
    may_go = by_class[~first_of_class]
    count = min(most, max(1, round(part * len(data))), len(may_go))
    if not count:
        raise InputError(f"'{data.source.name}' has one image a class: with more of them, some can be held out.")
    # Evenly spaced in the order of classes, so that each class gives in proportion to its images.
    held = may_go[((np.arange(count) + 0.5) * len(may_go) / count).astype(int)]
    remains = np.setdiff1d(np.arange(len(data)), held)
    return data.part(remains), data.part(np.sort(held))


class LabelledBatches:
    """Augmented images and their labels, an epoch at a time; without `crop` the whole image is resized."""

    def __init__(
        self,
        data: LabelledSet,
        augment: RandomCrop,
        device: torch.device,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        mode: LoaderMode = "auto",
        workers: int = 2,
        crop: bool = True,
        bad_images: BadImages | None = None,
        processes_on_host: int = 1,
        progress: Progress | None = None,
    ) -> None:
        view = augment if crop else WholeImage(augment.config, augment.size, augment.mean, augment.std)
        self.order = ShuffledOrder(data.indices, batch_size, seed, rank, world_size, drop_last=False)
        placement = Placement(mode, "cpu", workers, processes_on_host)
        self.batches = Batches(
            data.source, self.order, view, placement, device, seed, data.labels, bad_images, progress
        )
        self.mode, self.bad_images = self.batches.choices["loader"], self.batches.bad_images

    def __len__(self) -> int:
        return self.order.batches_per_epoch

    def epoch(self, number: int) -> Generator[LabelledBatch, None, None]:
        """Yield the batches of an epoch; close the generator to end its workers early."""
        with closing(self.batches.starting_at(number * len(self))) as batches:
            for images, labels, _ in islice(batches, len(self)):
                assert labels is not None
                yield images, labels


def reading_mode(
    data: LabelledSet, device: torch.device, processes_on_host: int = 1
) -> Literal["resident", "streaming"]:
    """Return resident if the images have one size and fit into memory."""
    order = ShuffledOrder(data.indices, 1)
    size = common_size(data.source, data.indices)
    return choose_mode(data.source, order, Placement(processes_on_host=processes_on_host), device, size)


class _Bytes(TestView):
    """A test view that is not normalised."""

    def of_whole(self, images: UInt8[Tensor, "b 3 h w"], *_: Tensor | None) -> UInt8[Tensor, "b 3 h2 w2"]:
        """Return the bytes of the view."""
        return self.cut(images)

    def of_cut(self, images: UInt8[Tensor, "b 3 h w"], *_: Tensor | None) -> UInt8[Tensor, "b 3 h w"]:
        """Return the images themselves."""
        return images


def labelled_views(
    source: ImageSource,
    indices: np.ndarray,
    size: tuple[int, int],
    resize_to: int | None,
    device: torch.device,
    batch_size: int = 256,
    workers: int = 2,
    bad_images: BadImages | None = None,
) -> Generator[tuple[Int[Tensor, " batch"], UInt8[Tensor, "batch 3 height width"]], None, None]:
    """Yield test views in order, each batch with its places in `indices`; bad images are left out."""
    _check_indices(source, indices)
    order = SequentialOrder(indices, batch_size)
    batches = Batches(
        source, order, _Bytes(size, resize_to), Placement("auto", "cpu", workers), device, bad_images=bad_images
    )
    by_image = np.argsort(order.images)
    with closing(batches.starting_at()) as found:
        for images, _, numbers in found:
            yield torch.from_numpy(by_image[np.searchsorted(order.images, numbers.numpy(), sorter=by_image)]), images


def DecodedSource(source: ImageSource, *_: object) -> ImageSource:
    """Return the source: `Batches` finds decoded images in the cache by itself."""
    return source
