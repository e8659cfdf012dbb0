"""Decoded images of one size: in memory, or in a file of the cache that every run maps into its memory."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from stop_mim.data.cache import CacheError, Record, cached_file, gib_from
from stop_mim.data.decode import MAX_PIXELS, BadImage
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.lookahead import mapped

Progress = Callable[[int, int], None]
"""Takes the number of images that are done and the number of all."""

VERSION = 2
"""Part of the cache's key: raise it when the same images would give other pixels."""
LEAST_CACHED_BYTES = 2**24
"""Smaller sets are not worth a file."""
DECODED_GIB = 4.0
"""Larger sets are not cached, unless STOP_MIM_DECODED_GIB allows it."""

_BYTES_A_PIECE, _IMAGES_A_PIECE = 2**21, 256
# A process takes as long to start as these take to decode.
_PIXELS_A_WORKER = 2**23


Bad = dict[int, str]
"""Why an image cannot be read, by its index in the source."""
Sizes = dict[int, tuple[int, int]]
"""The (height, width) of an image that was squashed, by its index in the source."""


@dataclass(frozen=True)
class StoredImages:
    """Images of one size; the row of a bad one is black, and one that had another size is squashed."""

    pixels: UInt8[Tensor, "n 3 height width"]
    rows: Int[np.ndarray, " m"]
    """The row of each image of the source."""
    bad: Bad
    sizes: Sizes
    from_cache: bool = False


def store_images(
    source: ImageSource,
    images: Int[np.ndarray, " k"],
    size: tuple[int, int],
    workers: int = 0,
    progress: Progress | None = None,
    may_cache: bool = True,
) -> StoredImages:
    """Decode these images of a source to one size, through the cache where it holds at least half of the source."""
    stacked = source.stacked()
    if stacked is not None and tuple(stacked.shape[2:]) == size:
        return StoredImages(stacked, np.arange(len(source)), {}, {})
    if may_cache and is_cacheable(source, images, size):
        try:
            return _cached_images(source, size, workers, progress)
        except CacheError as error:
            warnings.warn(
                f"Decoded images are not cached, and every run decodes them. {error} (STOP_MIM_DECODED_GIB=0 turns this "
                "cache off.)",
                stacklevel=2,
            )
    pixels = torch.empty(len(images), 3, *size, dtype=torch.uint8)

    def keep(start: int, decoded: np.ndarray) -> None:
        pixels[start : start + len(decoded)] = torch.from_numpy(decoded)

    bad, sizes = _decode(source, images, size, workers, progress, keep)
    rows = np.zeros(len(source), dtype=np.int64)
    rows[images] = np.arange(len(images))
    return StoredImages(pixels, rows, bad, sizes)


def is_cacheable(source: ImageSource, images: Int[np.ndarray, " k"], size: tuple[int, int]) -> bool:
    """Whether the decoded images belong in the cache: most of the source, neither too few bytes nor too many."""
    needed = 3 * len(source) * math.prod(size)
    most = gib_from("STOP_MIM_DECODED_GIB", DECODED_GIB)
    return 2 * len(images) >= len(source) and LEAST_CACHED_BYTES <= needed <= most


def _decode(
    source: ImageSource,
    images: Int[np.ndarray, " k"],
    size: tuple[int, int],
    workers: int,
    progress: Progress | None,
    keep: Callable[[int, np.ndarray], object],
) -> tuple[Bad, Sizes]:
    """Pass the pixels to `keep` in order, each piece with its start; return the bad images and the sizes of squashed ones."""
    pixels = math.prod(size)
    at_a_time = max(1, min(_IMAGES_A_PIECE, _BYTES_A_PIECE // (3 * pixels)))
    pieces = (images[start : start + at_a_time].tolist() for start in range(0, len(images), at_a_time))
    workers = min(workers, len(images) * pixels // _PIXELS_A_WORKER)
    bad: Bad = {}
    sizes: Sizes = {}
    done = 0
    for piece, bad_there, sizes_there in mapped(partial(_decode_piece, source, size), pieces, workers, 2 * workers):
        keep(done, piece)
        bad |= bad_there
        sizes |= sizes_there
        done += len(piece)
        if progress is not None:
            progress(done, len(images))
    return bad, sizes


def _decode_piece(source: ImageSource, size: tuple[int, int], images: list[int]) -> tuple[np.ndarray, Bad, Sizes]:
    pixels, bad, sizes = np.zeros((len(images), 3, *size), dtype=np.uint8), Bad(), Sizes()
    for place, index in enumerate(images):
        try:
            image = source.read(index)
        except BadImage as error:
            bad[index] = error.reason
            continue
        if (found := (image.shape[1], image.shape[2])) != size:
            sizes[index] = found
            image = resize(image, list(size), antialias=True)
        pixels[place] = image.numpy()
    return pixels, bad, sizes


def _cached_images(source: ImageSource, size: tuple[int, int], workers: int, progress: Progress | None) -> StoredImages:
    shape = (len(source), 3, *size)

    def write(draft: Path) -> Record:
        # Written, and not mapped: a full disk is then an error and not the end of the process.
        with draft.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            every = np.arange(len(source))
            bad, sizes = _decode(source, every, size, workers, progress, lambda _, pixels: file.write(pixels.data))
        return {"bad": bad, "sizes": sizes}

    key = digest([VERSION, source.fingerprint(), shape, MAX_PIXELS])
    # What kept a file from being read, such as a network, may be over.
    found = cached_file(
        f"decoded/{key}.npy",
        write,
        needed_bytes=math.prod(shape),
        is_valid=lambda record: not any(_is_readable(source, int(index)) for index in record["bad"]),
    )
    # Copy on write: torch warns of memory that must not be written.
    pixels = torch.from_numpy(np.load(found.path, mmap_mode="c", allow_pickle=False))
    bad = {int(index): str(reason) for index, reason in found.record["bad"].items()}
    sizes = {int(index): (height, width) for index, (height, width) in found.record["sizes"].items()}
    return StoredImages(pixels, np.arange(len(source)), bad, sizes, from_cache=not found.fresh)


def _is_readable(source: ImageSource, index: int) -> bool:
    try:
        source.read(index)
    except (BadImage, IndexError):
        return False
    return True
