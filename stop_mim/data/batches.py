"""`Batches`: the only way images reach a device, for training, probes, features and scores.

A source says what images there are, an order which of them make a batch, a view what is seen of them, and a placement
where they are kept and decoded: resident in memory, streamed by worker processes, or streamed and decoded on the GPU.
"""

import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from stop_mim.data.augment import TestView, View, draw
from stop_mim.data.decode import (
    BadImage,
    Box,
    GpuDecoder,
    OpenedImage,
    bounded_groups,
    cut,
    cut_each,
    decode_on_gpu,
    decode_with_nvjpeg,
    gpu_obstacle,
    jpeg_header,
)
from stop_mim.data.image_source import BadImages, ImageSource, common_size, first_good, no_good_images
from stop_mim.data.lookahead import mapped, prefetched
from stop_mim.data.order import BLOCKS_AHEAD, Order
from stop_mim.data.stored import Progress, StoredImages, is_cacheable, store_images
from stop_mim.errors import InputError
from stop_mim.options import Decode, LoaderMode
from stop_mim.seeds import derive_seed

ENOUGH_WORKERS = 7
"""This many workers decode photographs faster than a GPU that is training a ViT-B/16; see docs/results/performance.md."""
RESIDENT_PART_OF_GPU, RESIDENT_PART_OF_HOST = 0.4, 0.25

JPEGS_LOOKED_AT = 64
# A worker cuts this many images at a time, so that all workers share a large batch.
PIECE = 64
PIECES_AHEAD = 4
# Bounds of memory: files that are read, and pixels that are decoded, before the next stage has its turn.
_READ_TOGETHER, _CUT_TOGETHER = 32, 2**17
_GPU_BATCHES_AHEAD = 3
_COPIES_AHEAD = 2
# Batches whose blocks are fetched before they are read.
_FETCHED_AHEAD = 32


Bad = tuple[int, str]
"""The place of a bad image, and its description."""


class Batch(NamedTuple):
    """Images on the device, normalised; their labels, where there are any, on the device; their positions in the source."""

    images: Float[Tensor, "batch 3 height width"]
    labels: Int[Tensor, " batch"] | None
    indices: Int[Tensor, " batch"]


@dataclass(frozen=True)
class Placement:
    """Where images are kept and decoded."""

    mode: LoaderMode = "auto"
    """resident: decoded once and kept in memory; streaming: decoded at every use; auto: resident if that loses nothing."""
    decode: Decode = "auto"
    """Where streamed JPEGs are decoded; both see the same crops, whose pixels differ by a decoder's rounding."""
    workers: int = 2
    processes_on_host: int = 1
    shrink: bool = False
    """Store images no larger than the view needs them."""


class _Request(NamedTuple):
    epoch: int
    indices: Int[Tensor, " batch"]


class _Read(NamedTuple):
    """The images of a batch as bytes on the device, whole or cut."""

    epoch: int
    indices: Int[Tensor, " batch"]
    pixels: UInt8[Tensor, "batch 3 height width"]
    on_device: Int[Tensor, " batch"]
    bad: Sequence[str] = ()


class Batches:
    """Batches of a source on a device, from any batch on.

    All random draws of a view are a function of (seed, epoch, image). An image that cannot be read is left out of its
    batch; with `replace_bad` the next good image takes its place.

    Args:
        labels: a label for each image of the source.
        bad_images: where bad images are counted; too many of them raise InputError.
        progress: shows the decoding of resident images, which happens here.
    """

    def __init__(
        self,
        source: ImageSource,
        order: Order,
        view: View,
        placement: Placement,
        device: torch.device,
        seed: int = 0,
        labels: Int[np.ndarray, " n"] | None = None,
        bad_images: BadImages | None = None,
        progress: Progress | None = None,
        replace_bad: bool = False,
    ) -> None:
        self.source, self.order, self.view, self.device, self.seed = source, order, view, device, seed
        self.bad_images = BadImages(source.name, len(order.images)) if bad_images is None else bad_images
        self.n_images = len(order.images)
        self._labels = None if labels is None else torch.from_numpy(np.asarray(labels, np.int64)).to(device)
        self._sizes: Tensor | None = None
        self._reader = self._open(placement, progress, replace_bad)
        self.description: str = self._reader.description
        self.choices = {
            "loader": "resident" if isinstance(self._reader, _Resident) else "streaming",
            "decode": "gpu" if isinstance(self._reader, _GpuDecoded) else "cpu",
        }

    def starting_at(self, batch: int = 0) -> Generator[Batch, None, None]:
        """Yield batches, beginning with the one of that number; close the generator to end its workers early."""
        numbers = count(batch) if self.order.length is None else range(batch, self.order.length)
        requests = (_Request(self.order.epoch_of(number), self.order.indices(number)) for number in numbers)
        if self.source.blocks is not None:
            requests = _fetched(requests, self.source, self.source.blocks)
        with closing(self._reader.read(requests)) as batches:
            for read in batches:
                for description in read.bad:
                    self.bad_images.add(description)
                yield self._batch(read)

    def _batch(self, read: _Read) -> Batch:
        draws = draw(self.seed, read.epoch, read.on_device)
        if isinstance(self._reader, _Resident):
            sizes = None if self._sizes is None else self._sizes[read.on_device]
            images = self.view.of_whole(read.pixels, draws, sizes)
        else:
            images = self.view.of_cut(read.pixels, draws)
        return Batch(images, None if self._labels is None else self._labels[read.on_device], read.indices)

    def _open(
        self, placement: Placement, progress: Progress | None, replace_bad: bool
    ) -> "_Resident | _Streamed | _GpuDecoded":
        size = common_size(self.source, self.order.images)
        mode = choose_mode(self.source, self.order, placement, self.device, size)
        # A test view must not see squashed images.
        if mode == "resident" and (size or self.view.stored_size) is not None and self.view.retouch is None:
            stored = self._store(placement, size, progress)
            if not stored.sizes or self.view.stored_size is not None:
                for index in np.intersect1d(list(stored.bad), self.order.images).tolist():
                    self.bad_images.add(str(BadImage(self.source.describe(index), stored.bad[index])))
                return self._resident(stored, placement, replace_bad)
        cutter = ImageCutter(self.source, self.view, self.seed, replace_bad)
        decoder, obstacle = self._find_gpu_decoder(placement)
        if decoder is not None:
            return _GpuDecoded(cutter, self.device, placement.workers, decoder)
        return _Streamed(cutter, self.device, placement.workers, self.order.batch_size, self.n_images, obstacle)

    def _store(self, placement: Placement, common: tuple[int, int] | None, progress: Progress | None) -> StoredImages:
        needed = self.view.stored_size
        is_larger = common is not None and needed is not None and common[0] * common[1] > needed[0] * needed[1]
        size = needed if common is None or (placement.shrink and is_larger) else common
        assert size is not None
        images = np.unique(self.order.images)
        return store_images(self.source, images, size, placement.workers, progress, may_cache=size == common)

    def _resident(self, stored: StoredImages, placement: Placement, replace_bad: bool) -> "_Resident":
        """Choose the memory, and find the row of each image."""
        total, images = len(self.source), np.unique(self.order.images)
        shown = np.arange(total)
        if replace_bad and stored.bad:
            good = np.setdiff1d(images, np.fromiter(stored.bad, np.int64))
            if not len(good):
                raise no_good_images(self.source.name, len(images))
            shown[images] = good[np.searchsorted(good, images) % len(good)]
        if stored.sizes:
            sizes = torch.tensor([stored.pixels.shape[2:]]).repeat(total, 1)
            sizes[list(stored.sizes)] = torch.tensor(list(stored.sizes.values()))
            self._sizes = sizes[torch.from_numpy(shown)].to(self.device)
        rows, pixels = stored.rows[shown], stored.pixels
        used = np.unique(rows[images])
        needed = len(used) * pixels[0].numel()
        moves = self.order.length is None and needed <= resident_budget(self.device, placement.processes_on_host)
        if self.device.type != "cpu" and moves:
            rows = np.searchsorted(used, rows)
            pixels = (pixels if len(used) == len(pixels) else pixels[torch.from_numpy(used)]).to(self.device)
        kept = torch.ones(total, dtype=torch.bool)
        kept[[] if replace_bad else list(stored.bad)] = False
        described = f"{self.n_images:,} images of {pixels.shape[2]}x{pixels.shape[3]}, {needed / 2**30:.2f} GiB"
        description = f"resident: {described} on {pixels.device}"
        description += ", from the cache of decoded images" if stored.from_cache else ""
        rows_there = torch.from_numpy(rows).to(pixels.device)
        return _Resident(pixels, rows_there, kept, self.device, self.order.batch_size, description)

    def _find_gpu_decoder(self, placement: Placement) -> tuple[GpuDecoder | None, str]:
        """Return the decoder if JPEGs are to be decoded on the GPU; else None and what prevents it."""
        wanted = placement.decode
        enough = wanted == "auto" and placement.workers >= ENOUGH_WORKERS
        if wanted == "cpu" or enough or isinstance(self.view, TestView) or self.view.retouch is not None:
            return None, ""
        if self.device.type != "cuda":
            obstacle = f"the device is {self.device}"
        elif not are_jpegs(self.source):
            obstacle = f"the images of '{self.source.name}' are not stored as JPEGs"
        elif reason := gpu_obstacle(self.device):
            obstacle = f"torchvision's decoder does not work there: {reason}"
        else:
            return partial(decode_with_nvjpeg, device=self.device), ""
        if wanted == "gpu":
            raise InputError(f"speed.decode is gpu, but {obstacle}: choose auto or cpu.")
        return None, obstacle if self.device.type == "cuda" else ""


def _fetched(
    requests: Iterator[_Request], source: ImageSource, ends: Int[np.ndarray, " blocks"]
) -> Generator[_Request, None, None]:
    """Yield requests whose blocks have been fetched; a thread fetches the blocks of later requests."""
    waiting: deque[tuple[_Request, set[int], Future[None]]] = deque()

    def fetch(blocks: list[int]) -> None:
        for block in blocks:
            source.fetch(block)

    def first() -> _Request:
        request, _, fetched = waiting.popleft()
        fetched.result()
        return request

    fetcher = ThreadPoolExecutor(1, "fetch")
    try:
        for request in requests:
            blocks = set(np.searchsorted(ends, request.indices.numpy(), side="right").tolist())
            # More blocks than are kept must never be waited for.
            while waiting and len(blocks.union(*(one for _, one, _ in waiting))) > BLOCKS_AHEAD:
                yield first()
            waiting.append((request, blocks, fetcher.submit(fetch, sorted(blocks))))
            if len(waiting) > _FETCHED_AHEAD:
                yield first()
        while waiting:
            yield first()
    finally:
        fetcher.shutdown(cancel_futures=True)


def choose_mode(
    source: ImageSource, order: Order, placement: Placement, device: torch.device, size: tuple[int, int] | None
) -> Literal["resident", "streaming"]:
    """Return the mode that is asked for; auto is resident if images have one size, so that nothing is lost, and fit.

    For one pass, images are worth storing only if they are in memory or belong in the cache of decoded images.
    """
    if placement.mode != "auto":
        return placement.mode
    if size is None:
        return "streaming"
    if order.length is not None:
        fits = source.stacked() is not None or is_cacheable(source, order.images, size)
    else:
        fits = 3 * len(order.images) * size[0] * size[1] <= resident_budget(device, placement.processes_on_host)
    return "resident" if fits else "streaming"


def resident_budget(device: torch.device, processes_on_host: int = 1) -> int:
    """Return the bytes of images that may stay in the memory of this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * RESIDENT_PART_OF_GPU)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * RESIDENT_PART_OF_HOST / processes_on_host)


def are_jpegs(source: ImageSource) -> bool:
    """Whether most images of a source are usual JPEGs, judged by up to 64 evenly spread ones."""
    near = len(source) if source.blocks is None else int(source.blocks[0])
    looked_at = range(0, near, max(1, near // JPEGS_LOOKED_AT))
    found = 0
    for index in looked_at:
        with suppress(BadImage):
            found += jpeg_header(source.encoded(index) or b"") is not None
    return 2 * found > len(looked_at)


@dataclass(frozen=True)
class _Resident:
    """Whole images in memory; from host memory they are copied to the device ahead of use, through page-locked memory."""

    pixels: UInt8[Tensor, "n 3 height width"]
    rows: Int[Tensor, " m"]
    """The row of each image of the source, on the device of the pixels."""
    kept: Bool[Tensor, " m"]
    """Whether an image of the source is shown; bad images may be left out."""
    device: torch.device
    batch_size: int
    description: str

    def read(self, requests: Iterator[_Request]) -> Generator[_Read, None, None]:
        if self.pixels.device.type != self.device.type:
            yield from prefetched(self._copied(requests), self.device, _COPIES_AHEAD)
            return
        for epoch, wanted in requests:
            indices = wanted[self.kept[wanted]]
            on_device = indices.to(self.device, non_blocking=True)
            yield _Read(epoch, indices, self.pixels[self.rows[on_device]], on_device)

    def _copied(self, requests: Iterator[_Request]) -> Generator[_Read, None, None]:
        images, shape = self.pixels.numpy(), self.pixels.shape[1:]
        # One slot is being filled and one copied; the others wait to be used.
        with closing(_Slots(_COPIES_AHEAD + 2, (self.batch_size, *shape), self.device, shared=False)) as slots:
            for turn, (epoch, wanted) in enumerate(requests):
                indices, slot = wanted[self.kept[wanted]], slots.next(turn)
                # numpy copies in this thread: torch would use all cores and disturb the one that launches kernels.
                filled = slots.pixels[slot, : len(indices)].numpy()
                np.take(images, self.rows[indices].numpy(), axis=0, out=filled, mode="clip")
                pixels = torch.empty(len(indices), *shape, dtype=torch.uint8, device=self.device)
                slots.copy(slot, pixels)
                yield _Read(epoch, indices, pixels, indices.to(self.device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class ImageCutter:
    """Reads, decodes and cuts images on the CPU; can be pickled."""

    source: ImageSource
    view: View
    seed: int
    replace_bad: bool

    def fill(self, crops: UInt8[Tensor, "n height width 3"], epoch: int, indices: Sequence[int]) -> list[Bad]:
        """Write what the view shows of each image; return the bad images, by their place."""
        bad: list[Bad] = []
        for start in range(0, len(indices), _READ_TOGETHER):
            group = indices[start : start + _READ_TOGETHER]
            found = self._fill_group(crops[start : start + len(group)], epoch, group)
            bad += [(start + place, description) for place, description in found]
        return bad

    def _fill_group(self, crops: Tensor, epoch: int, indices: Sequence[int]) -> list[Bad]:
        bad: list[Bad] = []
        opened: dict[int, OpenedImage] = {}
        for place, index in enumerate(indices):
            try:
                opened[place] = self.source.open(index)
            except BadImage as error:
                bad.append((place, str(error)))
        bad += self._decode_and_cut(crops, opened, self.boxes(epoch, indices, opened))
        if bad and self.replace_bad:
            others: dict[int, OpenedImage] = {}
            for place in dict(bad):
                others[place], also_bad = first_good(self.source, (indices[place] + 1) % len(self.source))
                bad += [(place, description) for description in also_bad]
            self._decode_and_cut(crops, others, self.boxes(epoch, indices, others))
        if self.view.retouch is not None:
            for place, index in enumerate(indices):
                crops[place] = self.view.retouch(crops[place], derive_seed(self.seed, "retouch", epoch, index))
        return bad

    def _decode_and_cut(self, crops: Tensor, opened: Mapping[int, OpenedImage], boxes: Mapping[int, Box]) -> list[Bad]:
        bad: list[Bad] = []
        decoded: dict[int, tuple[Tensor, Box]] = {}
        pixels = 0
        # Decoding and cutting take turns as rarely as the caches allow: image by image, small ones take a third longer.
        for place, image in opened.items():
            whole = isinstance(self.view, TestView)
            try:
                found = (image.decode(), boxes[place]) if whole else image.decode_part(boxes[place], self.view.size)
            except BadImage as error:
                bad.append((place, str(error)))
                continue
            decoded[place] = found
            pixels += found[0].shape[0] * found[0].shape[1]
            if pixels >= _CUT_TOGETHER:
                self._cut(crops, decoded)
                decoded, pixels = {}, 0
        self._cut(crops, decoded)
        return bad

    def boxes(self, epoch: int, indices: Sequence[int], opened: Mapping[int, OpenedImage]) -> dict[int, Box]:
        """Return the part that the view shows of each image, by its place in `indices`."""
        if isinstance(self.view, TestView) or not opened:
            return {place: (0, 0, *image.size) for place, image in opened.items()}
        draws = draw(self.seed, epoch, torch.tensor([indices[place] for place in opened]))
        boxes = self.view.boxes(torch.tensor([image.size for image in opened.values()]), draws).tolist()
        return {place: (box[0], box[1], box[2], box[3]) for place, box in zip(opened, boxes, strict=True)}

    def _cut(self, crops: Tensor, decoded: Mapping[int, tuple[Tensor, Box]]) -> None:
        for place, (pixels, box) in decoded.items():
            if isinstance(self.view, TestView):
                crops[place] = self.view.cut(pixels.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
            else:
                crops[place] = cut(pixels, box, self.view.size, self.view.interpolation)


class _Slots:
    """A ring of (parts of) batches in page-locked memory, from which they are copied to the device in the background.

    Workers fill shared slots: new shared memory for every batch would cost them as much as resizing the images.
    """

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device, shared: bool) -> None:
        pixels = torch.empty(count, *shape, dtype=torch.uint8)
        self.pixels = pixels.share_memory_() if shared else pixels
        self.device = device
        self._locked = False
        self._copied: list[torch.cuda.Event | None] = [None] * count
        if device.type == "cuda":
            # Page-locked memory is copied to the GPU in the background; where that is refused, the copy only takes longer.
            refusal = torch.cuda.cudart().cudaHostRegister(self.pixels.data_ptr(), self.pixels.numel(), 0)
            self._locked = int(refusal) == 0
            if not self._locked:
                # CUDA keeps the error, and the next kernel launch would report it.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)

    def close(self) -> None:
        """Unlock the memory."""
        if self._locked:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.pixels.data_ptr())

    def copy(self, slot: int, target: UInt8[Tensor, "n _ _ _"]) -> None:
        """Copy the images of a slot to the device."""
        target.copy_(self.pixels[slot, : len(target)], non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
            self._copied[slot] = copied

    def next(self, number: int) -> int:
        """Return the slot of the piece of that number, once it may be filled again."""
        slot = number % len(self._copied)
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        return slot


def _fill_slot(
    cutter: ImageCutter, pixels: UInt8[Tensor, "slots piece height width 3"], request: tuple[int, int, list[int]]
) -> tuple[int, list[Bad]]:
    """Fill a slot in a worker; only the slot's number and bad images travel between processes."""
    slot, epoch, indices = request
    return slot, cutter.fill(pixels[slot, : len(indices)], epoch, indices)


class _Streamed:
    """Images that worker processes read, decode and cut as they are needed."""

    def __init__(
        self, cutter: ImageCutter, device: torch.device, workers: int, batch_size: int, n_images: int, obstacle: str
    ) -> None:
        self.cutter, self.device, self.workers, self.batch_size = cutter, device, workers, batch_size
        self.description = f"streaming: {n_images:,} images, decoded by {workers or 'no'} workers"
        self.description += f" (not on the GPU: {obstacle})" if obstacle else ""

    def read(self, requests: Iterator[_Request]) -> Generator[_Read, None, None]:
        piece = min(PIECE, self.batch_size)
        ahead = max(PIECES_AHEAD * self.workers, 2 * -(-self.batch_size // piece)) if self.workers else 0
        taken: deque[_Request] = deque()
        shape = (piece, *self.cutter.view.size, 3)
        with closing(_Slots(ahead + 2, shape, self.device, shared=self.workers > 0)) as slots:

            def pieces() -> Iterator[tuple[int, int, list[int]]]:
                numbers = count()
                for request in requests:
                    taken.append(request)
                    for part in request.indices.split(piece):
                        yield slots.next(next(numbers)), request.epoch, part.tolist()

            work = partial(_fill_slot, self.cutter, slots.pixels)
            with closing(mapped(work, pieces(), self.workers, ahead)) as filled:
                for first in filled:
                    request, bad = taken.popleft(), list[Bad]()
                    pixels = torch.empty(len(request.indices), *shape[1:], dtype=torch.uint8, device=self.device)
                    for start in range(0, len(pixels), piece):
                        slot, found = next(filled) if start else first
                        slots.copy(slot, pixels[start : start + piece])
                        bad += [(start + place, description) for place, description in found]
                    yield _as_read(request, pixels.permute(0, 3, 1, 2), bad, self.cutter.replace_bad, self.device)


def _as_read(
    request: _Request,
    pixels: UInt8[Tensor, "batch 3 height width"],
    bad: list[Bad],
    replace_bad: bool,
    device: torch.device,
) -> _Read:
    indices = request.indices
    if bad and not replace_bad:
        good = torch.ones(len(indices), dtype=torch.bool)
        good[[place for place, _ in bad]] = False
        indices, pixels = indices[good], pixels[good.to(device)]
    descriptions = [description for _, description in bad]
    on_device = indices.to(device, non_blocking=True)
    return _Read(request.epoch, indices, pixels.contiguous(), on_device, descriptions)


class _GpuDecoded:
    """JPEGs that threads read and the device decodes and cuts; other images are cut on the CPU."""

    def __init__(self, cutter: ImageCutter, device: torch.device, threads: int, decoder: GpuDecoder) -> None:
        self.cutter, self.device, self.threads, self.decoder = cutter, device, max(1, threads), decoder
        images = f"{len(cutter.source):,} images"
        self.description = f"streaming: {images}, decoded on {device}, read by {self.threads} threads"

    def read(self, requests: Iterator[_Request]) -> Generator[_Read, None, None]:
        with (
            ThreadPoolExecutor(self.threads, "read") as readers,
            closing(prefetched(self._made(requests, readers), self.device, _GPU_BATCHES_AHEAD)) as made,
        ):
            yield from made

    def _made(self, requests: Iterator[_Request], readers: ThreadPoolExecutor) -> Generator[_Read, None, None]:
        opening: deque[tuple[_Request, list[Future[list[OpenedImage | None]]]]] = deque()
        for request in requests:
            groups = [part.tolist() for part in request.indices.split(_READ_TOGETHER)]
            opening.append((request, [readers.submit(self._open, group) for group in groups]))
            if len(opening) > _GPU_BATCHES_AHEAD:
                yield self._make(*opening.popleft(), readers)
        while opening:
            yield self._make(*opening.popleft(), readers)

    def _open(self, indices: list[int]) -> list[OpenedImage | None]:
        """Read images; None where the device cannot decode one."""
        source, found = self.cutter.source, list[OpenedImage | None]()
        for index in indices:
            opened = None
            with suppress(BadImage):
                opened = OpenedImage.of_jpeg(source.encoded(index) or b"", source.describe(index))
            found.append(opened if opened is not None and opened.suits_gpu else None)
        return found

    def _make(
        self, request: _Request, opening: list[Future[list[OpenedImage | None]]], readers: ThreadPoolExecutor
    ) -> _Read:
        opened = [image for group in opening for image in group.result()]
        images = {place: image for place, image in enumerate(opened) if image is not None}
        pixels = torch.empty(len(opened), 3, *self.cutter.view.size, dtype=torch.uint8, device=self.device)
        rest = [place for place in range(len(opened)) if place not in images]
        on_cpu = self._cut_on_cpu(request, rest, readers)
        failed = self._cut_on_gpu(request, images, pixels)
        bad: list[Bad] = []
        for places, crops, skipped in on_cpu + self._cut_on_cpu(request, failed, readers):
            found = skipped.result()
            pixels[torch.tensor(places, device=self.device)] = crops.permute(0, 3, 1, 2).to(self.device)
            bad += [(places[at], description) for at, description in found]
        return _as_read(request, pixels, bad, self.cutter.replace_bad, self.device)

    def _cut_on_gpu(self, request: _Request, images: Mapping[int, OpenedImage], pixels: Tensor) -> list[int]:
        """Decode and cut images into their places; return the places of failures."""
        places = list(images)
        boxes = self.cutter.boxes(request.epoch, request.indices.tolist(), images)
        failed: list[int] = []
        for group in bounded_groups([image.size for image in images.values()]):
            if self.device.type == "cuda":
                # The decoder writes at once, into memory that earlier work of this stream may still have to read.
                torch.cuda.current_stream(self.device).synchronize()
            decoded = decode_on_gpu(self.decoder, [images[places[at]] for at in group])
            good = {at: image for at, image in zip(group, decoded, strict=True) if image is not None}
            failed += [places[at] for at in group if at not in good]
            if good:
                view = self.cutter.view
                inside = [boxes[places[at]] for at in good]
                crops = cut_each(list(good.values()), inside, view.size, view.interpolation)
                pixels[torch.tensor([places[at] for at in good], device=self.device)] = crops
        return failed

    def _cut_on_cpu(
        self, request: _Request, places: list[int], readers: ThreadPoolExecutor
    ) -> list[tuple[list[int], Tensor, Future[list[Bad]]]]:
        at_a_time = max(1, _READ_TOGETHER // 4)
        jobs = []
        for group in (places[start : start + at_a_time] for start in range(0, len(places), at_a_time)):
            crops = torch.empty(len(group), *self.cutter.view.size, 3, dtype=torch.uint8)
            indices = request.indices[group].tolist()
            jobs.append((group, crops, readers.submit(self.cutter.fill, crops, request.epoch, indices)))
        return jobs
