"""Images of one size that are decoded once and read from memory; large sets are mapped from the disk cache."""

import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from stop_mim.data.augment import TestView
from stop_mim.data.cache import CacheError, cache_folder, cached_file, damage_named, gib_from
from stop_mim.data.decode import MAX_PIXELS, BadImage
from stop_mim.data.image_source import ImageSource, digest, no_good_images
from stop_mim.data.lookahead import Slots, mapped, prefetched
from stop_mim.data.order import Request
from stop_mim.data.streamed import ReadImages
from stop_mim.errors import InputError
from stop_mim.records import from_plain

Progress = Callable[[int, int], None]
"""Takes the number of images that are done and the number of all."""

VERSION = 3
"""Part of the cache's key: raise it when the same images would give other pixels."""
LEAST_CACHED_BYTES = 2**24
"""Smaller sets are not cached."""
DECODED_GIB = 4.0
"""Larger sets are not cached, unless STOP_MIM_DECODED_GIB allows it."""

_BYTES_A_PIECE, _IMAGES_A_PIECE = 2**21, 256
# Starting a process takes as long as decoding this many pixels.
_PIXELS_A_WORKER = 2**23
_COPIES_AHEAD = 2


class MixedSizes(InputError):
    """The images cannot be kept in memory, because they differ in size."""


def mixed_sizes(name: str) -> MixedSizes:
    """Return the error for a dataset of that name."""
    return MixedSizes(
        f"speed.loader is resident, but the images of '{name}' differ in size or are at URLs: choose auto or streaming."
    )


@dataclass(frozen=True)
class StoredImages:
    """Images of one size; the row of a bad one is black."""

    pixels: UInt8[Tensor, "n 3 height width"]
    rows: Int[np.ndarray, " m"]
    """The row of each image of the source."""
    bad: dict[int, str]
    """The descriptions of bad images, by their index in the source."""
    from_cache: bool = False


def store_images(
    source: ImageSource,
    images: Int[np.ndarray, " k"],
    size: tuple[int, int],
    workers: int = 0,
    progress: Progress | None = None,
    view: TestView | None = None,
) -> StoredImages:
    """Decode images of a source. Where they are at least half of the source, all of it is decoded and cached.

    The view resizes every image to `size`; without it, an image of another size raises MixedSizes.
    """
    stacked = source.stacked()
    if stacked is not None and view is None:
        return StoredImages(stacked, np.arange(len(source)), {})
    if is_cacheable(source, images, size):
        try:
            return _cached_images(source, size, workers, progress, view)
        except CacheError as error:
            warnings.warn(
                f"Decoded images are not cached, and every run decodes them. {error} (STOP_MIM_DECODED_GIB=0 turns this "
                "cache off.)",
                stacklevel=2,
            )
    pixels = torch.empty(len(images), 3, *size, dtype=torch.uint8)

    def keep(start: int, decoded: np.ndarray) -> None:
        pixels[start : start + len(decoded)] = torch.from_numpy(decoded)

    bad = _decode(partial(_read, source, size, view), images, size, workers, progress, keep)
    rows = np.zeros(len(source), dtype=np.int64)
    rows[images] = np.arange(len(images))
    return StoredImages(pixels, rows, bad)


def is_cacheable(source: ImageSource, images: Int[np.ndarray, " k"], size: tuple[int, int]) -> bool:
    """Whether the decoded images belong in the cache: most of the source, neither too few bytes nor too many."""
    needed = 3 * len(source) * math.prod(size)
    most = gib_from("STOP_MIM_DECODED_GIB", DECODED_GIB)
    return 2 * len(images) >= len(source) and LEAST_CACHED_BYTES <= needed <= most


def _read(source: ImageSource, size: tuple[int, int], view: TestView | None, index: int) -> Tensor:
    image = source.read(index) if view is None else view.cut(source.read(index))
    if tuple(image.shape[1:]) != size:
        raise mixed_sizes(source.name)
    return image


def _decode(
    read: Callable[[int], Tensor],
    images: Int[np.ndarray, " k"],
    size: tuple[int, int],
    workers: int,
    progress: Progress | None,
    keep: Callable[[int, np.ndarray], object],
) -> dict[int, str]:
    """Call `keep(start, pixels)` for each piece, in order; return the bad images."""
    pixels = math.prod(size)
    at_a_time = max(1, min(_IMAGES_A_PIECE, _BYTES_A_PIECE // (3 * pixels)))
    pieces = (images[start : start + at_a_time].tolist() for start in range(0, len(images), at_a_time))
    workers = min(workers, len(images) * pixels // _PIXELS_A_WORKER)
    bad: dict[int, str] = {}
    done = 0
    for piece, bad_there in mapped(partial(_decode_piece, read, size), pieces, workers, 2 * workers):
        keep(done, piece)
        bad |= bad_there
        done += len(piece)
        if progress is not None:
            progress(done, len(images))
    return bad


def _decode_piece(
    read: Callable[[int], Tensor], size: tuple[int, int], images: list[int]
) -> tuple[np.ndarray, dict[int, str]]:
    pixels, bad = np.zeros((len(images), 3, *size), dtype=np.uint8), dict[int, str]()
    for place, index in enumerate(images):
        try:
            pixels[place] = read(index).numpy()
        except BadImage as error:
            bad[index] = str(error)
    return pixels, bad


def _cached_images(
    source: ImageSource, size: tuple[int, int], workers: int, progress: Progress | None, view: TestView | None
) -> StoredImages:
    shape, read = (len(source), 3, *size), partial(_read, source, size, view)

    def write(draft: Path) -> None:
        draft.mkdir()
        # Checked first: decoding takes long, and a full disk disturbs other programs.
        if shutil.disk_usage(draft).free < math.prod(shape):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Written, not memory-mapped: a full disk then raises an error instead of killing the process.
        with (draft / "pixels.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            every = np.arange(len(source))
            bad = _decode(read, every, size, workers, progress, lambda _, pixels: file.write(pixels.data))
        (draft / "bad.json").write_text(json.dumps(list(bad)))

    seen_through = [] if view is None else [view.resize_to, view.interpolation]
    name = f"decoded/{digest([VERSION, source.fingerprint(), shape, MAX_PIXELS, *seen_through])}"
    from_cache = (cache_folder() / name).exists()
    folder = cached_file(name, write)
    with damage_named(folder):
        # Copy on write, because torch warns about read-only memory.
        pixels = torch.from_numpy(np.load(folder / "pixels.npy", mmap_mode="c", allow_pickle=False))
        was_bad = from_plain(list[int], json.loads((folder / "bad.json").read_text()))
        if not all(0 <= index < len(pixels) for index in was_bad):
            raise InputError(f"bad.json names images beyond {len(pixels)}")
    bad: dict[int, str] = {}
    for index in was_bad:
        # The cause, such as a network failure, may be gone.
        try:
            pixels[index] = read(index)
        except BadImage as error:
            bad[index] = str(error)
    return StoredImages(pixels, np.arange(len(source)), bad, from_cache)


def _some_on(
    device: torch.device, pixels: UInt8[Tensor, "n 3 height width"], rows: Int[np.ndarray, " k"]
) -> UInt8[Tensor, "k 3 height width"]:
    """Copy some rows to the device, in pieces: indexing copies them in the memory of the host first."""
    found = torch.empty(len(rows), *pixels.shape[1:], dtype=pixels.dtype, device=device)
    for start in range(0, len(rows), _IMAGES_A_PIECE):
        piece = torch.from_numpy(rows[start : start + _IMAGES_A_PIECE])
        found[start : start + len(piece)] = pixels[piece].to(device)
    return found


class Resident:
    """Whole images in memory; from host memory they are copied to the device ahead of use, through page-locked memory.

    They are kept on the device if they take at most `budget` bytes there. `images` are those that are shown; with
    `replace_bad` the next good one takes the place of a bad one, which is left out otherwise.
    """

    def __init__(
        self,
        source: ImageSource,
        stored: StoredImages,
        images: Int[np.ndarray, " k"],
        device: torch.device,
        batch_size: int,
        budget: int,
        replace_bad: bool,
    ) -> None:
        self.device, self.batch_size = device, batch_size
        self.kept = torch.ones(len(source), dtype=torch.bool)
        shown = np.arange(len(source))
        if stored.bad and replace_bad:
            unique = np.unique(images)
            good = np.setdiff1d(unique, np.fromiter(stored.bad, np.int64))
            if not len(good):
                raise no_good_images(source.name, len(unique))
            shown[unique] = good[np.searchsorted(good, unique) % len(good)]
        elif stored.bad:
            self.kept[list(stored.bad)] = False
        rows, pixels = stored.rows[shown], stored.pixels
        used = np.unique(rows[images])
        needed = len(used) * pixels[0].numel()
        if device.type != "cpu" and needed <= budget:
            rows = np.searchsorted(used, rows)
            pixels = pixels.to(device) if len(used) == len(pixels) else _some_on(device, pixels, used)
        self.pixels, self.rows = pixels, torch.from_numpy(rows).to(pixels.device)
        described = f"{len(images):,} images of {pixels.shape[2]}x{pixels.shape[3]}, {needed / 2**30:.2f} GiB"
        self.description = f"resident: {described} on {pixels.device}"
        self.description += ", from the cache of decoded images" if stored.from_cache else ""

    def read(self, requests: Iterator[Request]) -> Generator[ReadImages, None, None]:
        """Yield the images of each request."""
        if self.pixels.device.type != self.device.type:
            yield from prefetched(self._copied(requests), self.device, _COPIES_AHEAD)
            return
        for epoch, wanted in requests:
            indices = wanted[self.kept[wanted]]
            on_device = indices.to(self.device, non_blocking=True)
            yield ReadImages(epoch, indices, self.pixels[self.rows[on_device]], on_device)

    def _copied(self, requests: Iterator[Request]) -> Generator[ReadImages, None, None]:
        images, shape = self.pixels.numpy(), self.pixels.shape[1:]
        # One slot is being filled and one copied; the others wait to be used.
        with closing(Slots(_COPIES_AHEAD + 2, (self.batch_size, *shape), self.device, shared=False)) as slots:
            for turn, (epoch, wanted) in enumerate(requests):
                indices, slot = wanted[self.kept[wanted]], slots.next(turn)
                # numpy copies in this thread: torch would use all cores and disturb the one that launches kernels.
                filled = slots.pixels[slot, : len(indices)].numpy()
                np.take(images, self.rows[indices].numpy(), axis=0, out=filled, mode="clip")
                pixels = torch.empty(len(indices), *shape, dtype=torch.uint8, device=self.device)
                slots.copy(slot, pixels)
                yield ReadImages(epoch, indices, pixels, indices.to(self.device, non_blocking=True))
