"""Images with their labels: shuffled, augmented batches to learn from, and plain views to be scored on.

A label belongs to the image that is shown: an image that cannot be read is left out, never replaced by another one.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import center_crop, resize, resized_crop

from stop_mim.data.augment import Augment, resize_batch, sample_crop_boxes
from stop_mim.data.bad_images import BadImages
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.images import BadImage
from stop_mim.data.loader import LoaderMode, Progress, choose_mode, ignore_signals, store_images
from stop_mim.data.stacked import stacked_batches
from stop_mim.errors import InputError
from stop_mim.seeds import derive_seed, seeded_generator

# A worker decodes this many images before it hands them over: all workers share a large batch.
IMAGES_A_PIECE = 64
LEAST_IMAGES_A_BATCH = 2

LabelledBatch = tuple[Float[Tensor, "batch 3 height width"], Int[Tensor, " batch"]]
View = Callable[[UInt8[Tensor, "3 h w"], int], UInt8[Tensor, "3 h2 w2"]]


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Some images of a source, and the class of each."""

    source: ImageSource
    """Where the images are."""
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
    """What remains, and a part that is held out, of every class alike; an image of each class always remains."""
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


class EpochOrder:
    """Every epoch visits all images once, in an order of its own; each process has its part of every batch.

    The last batch holds what is left; where that would leave a process with too few, it joins the batch before.
    """

    def __init__(self, n_images: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}: give a number above zero.")
        if n_images < world_size:
            raise InputError(f"There are {n_images} images for {world_size} processes: start fewer processes.")
        self.n_images, self.seed, self.rank, self.world_size = n_images, seed, rank, world_size
        self._together = batch_size * world_size
        whole, left = divmod(n_images, self._together)
        enough = left >= min(LEAST_IMAGES_A_BATCH, batch_size) * world_size
        self._steps = max(1, whole + enough)

    def __len__(self) -> int:
        """Batches an epoch, the same in every process."""
        return self._steps

    def batches(self, epoch: int) -> Iterator[Int[Tensor, " batch"]]:
        """The images of this process's batches, one batch after the other."""
        order = torch.randperm(self.n_images, generator=seeded_generator("cpu", self.seed, "order", epoch))
        for step in range(self._steps):
            start = step * self._together
            end = self.n_images if step == self._steps - 1 else start + self._together
            yield order[start:end].tensor_split(self.world_size)[self.rank]


class LabelledBatches:
    """Augmented, normalised images and their labels on the training device, an epoch at a time.

    With `crop` the augmentation draws a random crop; without, the whole image is resized. Images of one size that fit
    become resident in the device's memory, others are decoded by workers as they are needed.
    """

    def __init__(
        self,
        data: LabelledSet,
        augment: Augment,
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
        self.augment, self.device, self.seed, self.rank, self.crop = augment, device, seed, rank, crop
        self.bad_images = BadImages(data.source.name, len(data)) if bad_images is None else bad_images
        self.mode = reading_mode(data, device, processes_on_host) if mode == "auto" else mode
        usable = np.arange(len(data))
        if self.mode == "resident":
            selection = _Selection(data.source, data.indices)
            self._stored = store_images(selection, augment.size, self.bad_images, progress, device)
            usable = np.delete(usable, sorted(selection.unreadable))
        else:
            view = _RandomCrop(augment) if crop else _TestView(augment.size, None)
            self._decoder = _Decoder(data.source, view, augment.size, device, workers)
        self._images = data.indices[usable]
        self._labels = torch.from_numpy(data.classes[usable]).to(device)
        self._order = EpochOrder(len(usable), batch_size, seed, rank, world_size)

    def __len__(self) -> int:
        """Batches an epoch, the same in every process."""
        return len(self._order)

    def epoch(self, number: int) -> Generator[LabelledBatch, None, None]:
        """The batches of that epoch; one with bad images, where they were not known before, is smaller by them.

        Workers end with the epoch: where it may be left early, close it.
        """
        read = self._read_resident if self.mode == "resident" else self._read_streamed
        for batch, (positions, pixels) in enumerate(read(number)):
            generator = seeded_generator(self.device, self.seed, "augment", number, batch, self.rank)
            yield self._augmented(positions, pixels, generator), self._labels[positions.to(self.device)]

    def _augmented(self, positions: Tensor, pixels: Tensor, generator: torch.Generator) -> Tensor:
        if self.mode == "resident" and self.crop:
            sizes = self._stored.original_sizes
            return self.augment(pixels, generator, None if sizes is None else sizes[positions])
        return self.augment.without_crop(resize_batch(pixels, self.augment.size), generator)

    def _read_resident(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for positions in self._order.batches(epoch):
            yield positions, self._stored.pixels[positions.to(self.device)]

    def _read_streamed(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        def requests(positions: Tensor) -> list[_Request]:
            images = self._images[positions.numpy()].tolist()
            seeds = [derive_seed(self.seed, "crop", epoch, image) for image in images]
            return [_Request(*request) for request in zip(positions.tolist(), images, seeds, strict=True)]

        return self._decoder.read(map(requests, self._order.batches(epoch)), self.bad_images)


def reading_mode(
    data: LabelledSet, device: torch.device, processes_on_host: int = 1
) -> Literal["resident", "streaming"]:
    """Resident if the images have one size and fit; memory differs, so one process has to choose for all."""
    return choose_mode(_Selection(data.source, data.indices), device, processes_on_host)


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
    """Images as they are to be scored, in order, each with its place in `indices`; bad ones are left out.

    The short side becomes `resize_to` and the centre is cut out; without `resize_to` the whole image is resized. Workers
    end with the images: where they may be left early, close the generator.
    """
    _check_indices(source, indices)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: give a number above zero.")
    if resize_to is not None and resize_to < max(size):
        raise InputError(f"resize_to is {resize_to}: a crop of {size} needs at least {max(size)}.")
    view, places = _TestView(size, resize_to), torch.arange(len(indices)).split(batch_size) if len(indices) else ()
    stacked = source.stacked()
    if stacked is not None:
        return _stacked_views(stacked, torch.from_numpy(indices.astype(np.int64)), places, view, device)

    def requests(positions: Tensor) -> list[_Request]:
        images = indices[positions.numpy()].tolist()
        return [_Request(*request) for request in zip(positions.tolist(), images, strict=True)]

    bad_images = BadImages(source.name, len(indices)) if bad_images is None else bad_images
    decoder = _Decoder(source, view, size, device, workers)
    return decoder.read(map(requests, places), bad_images)


def _stacked_views(
    stacked: Tensor, indices: Tensor, places: Sequence[Tensor], view: "_TestView", device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    with closing(stacked_batches(stacked, [indices[positions] for positions in places], device)) as batches:
        for positions, pixels in zip(places, batches, strict=True):
            yield positions, view(pixels)


@dataclass(frozen=True)
class _TestView:
    size: tuple[int, int]
    resize_to: int | None

    def __call__(self, pixels: Tensor, seed: int = 0) -> Tensor:
        if self.resize_to is None:
            return resize(pixels, list(self.size), antialias=True)
        return center_crop(resize(pixels, [self.resize_to], antialias=True), list(self.size))


@dataclass(frozen=True)
class _RandomCrop:
    augment: Augment

    def __call__(self, pixels: Tensor, seed: int) -> Tensor:
        config, generator = self.augment.config, torch.Generator().manual_seed(seed)
        size = torch.tensor([pixels.shape[-2:]])
        box = sample_crop_boxes(size, config.crop_scale, config.crop_ratio, generator)[0].tolist()
        return resized_crop(pixels, *box, list(self.augment.size), antialias=True)


class _Selection(ImageSource):
    """Some images of a source as a source of their own, which remembers the places of those that could not be read."""

    def __init__(self, source: ImageSource, indices: np.ndarray) -> None:
        super().__init__(source.name)
        self.source, self.indices = source, indices
        self.unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        try:
            return self.source.read(int(self.indices[index]))
        except BadImage:
            self.unreadable.add(index)
            raise

    def size(self, index: int) -> tuple[int, int]:
        return self.source.size(int(self.indices[index]))

    def describe(self, index: int) -> str:
        return self.source.describe(int(self.indices[index]))

    def fingerprint(self) -> str:
        return digest([self.source.fingerprint(), self.indices.tobytes()])

    def stacked(self) -> UInt8[Tensor, "n 3 height width"] | None:
        images = self.source.stacked()
        return None if images is None else images[torch.from_numpy(self.indices.astype(np.int64))]


class _Request(NamedTuple):
    position: int
    image: int
    seed: int = 0
    ends_batch: bool = False


class _Piece(NamedTuple):
    positions: Tensor
    pixels: Tensor
    bad: list[str]
    ends_batch: bool


@dataclass(frozen=True)
class _Decoder:
    """Workers (or, with none, this process) that decode images and change their view."""

    source: ImageSource
    view: View
    size: tuple[int, int]
    device: torch.device
    workers: int

    def read(
        self, batches: Iterable[list[_Request]], bad_images: BadImages
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Positions and pixels of one batch after the other, without the bad images; the workers end with it."""
        reader: DataLoader[_Piece] = DataLoader(
            _Decoded(self.source, self.view),  # type: ignore[arg-type]
            batch_sampler=_pieces(batches),
            collate_fn=partial(_collate, self.size),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            worker_init_fn=ignore_signals,
            # Without one of its own, every start of the workers would move the global generator.
            generator=torch.Generator(),
        )
        positions, pixels = [], []
        for piece in reader:
            for description in piece.bad:
                bad_images.add(description)
            positions.append(piece.positions)
            pixels.append(piece.pixels.to(self.device, non_blocking=True))
            if piece.ends_batch:
                yield torch.cat(positions), torch.cat(pixels)
                positions, pixels = [], []


def _pieces(batches: Iterable[list[_Request]]) -> Iterator[list[_Request]]:
    """Batches of requests, cut into what a worker decodes at a time."""
    for batch in batches:
        batch[-1] = batch[-1]._replace(ends_batch=True)
        for start in range(0, len(batch), IMAGES_A_PIECE):
            yield batch[start : start + IMAGES_A_PIECE]


class _Decoded(Dataset[tuple[_Request, Tensor | str]]):
    def __init__(self, source: ImageSource, view: View) -> None:
        self.source, self.view = source, view

    def __getitem__(self, request: _Request) -> tuple[_Request, Tensor | str]:
        try:
            return request, self.view(self.source.read(request.image), request.seed)
        except BadImage as error:
            return request, str(error)


def _collate(size: tuple[int, int], samples: Sequence[tuple[_Request, Tensor | str]]) -> _Piece:
    good = [(request.position, pixels) for request, pixels in samples if isinstance(pixels, Tensor)]
    return _Piece(
        torch.tensor([position for position, _ in good], dtype=torch.long),
        torch.stack([pixels for _, pixels in good]) if good else torch.empty(0, 3, *size, dtype=torch.uint8),
        [reason for _, reason in samples if isinstance(reason, str)],
        samples[-1][0].ends_batch,
    )
