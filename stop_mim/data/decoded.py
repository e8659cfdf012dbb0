"""Images of one size, decoded once a machine: bytes in the cache folder, which every run maps into its memory.

The pixels are an .npy file, a row an image; the .json file beside it is written last and tells what the pixels must be.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import resize

from stop_mim.data.cache import cache_folder, decoded_limit
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.images import BadImage
from stop_mim.files import write_atomically

Progress = Callable[[int, int], None]

# Goes into the name of what is stored: to be raised when the same images would give other pixels.
VERSION = 1
# Fewer are decoded in less time than a file takes.
LEAST_CACHED_BYTES = 2**24
BYTES_A_PIECE, MOST_IMAGES_A_PIECE = 2**21, 256
# A process of its own takes as long to begin as these are to decode.
PIXELS_A_WORKER = 2**23
# Of so many pixels the decoding, which needs no interpreter, takes as long as all else that is done to an image.
PIXELS_A_THREAD = 2**13


class Piece(NamedTuple):
    """Some decoded images that follow one another; a bad one is black, one of another size is squashed."""

    first: int
    pixels: UInt8[Tensor, "n 3 height width"]
    bad: dict[int, str]
    """Why an image could not be read, by its number in the source."""
    sizes: dict[int, tuple[int, int]]
    """The size that a squashed image had."""


class _Pieces(Dataset[Piece]):
    def __init__(self, source: ImageSource, size: tuple[int, int]) -> None:
        self.source, self.size = source, size

    def __getitem__(self, numbers: range) -> Piece:
        piece = Piece(numbers.start, torch.zeros(len(numbers), 3, *self.size, dtype=torch.uint8), {}, {})
        for place, number in enumerate(numbers):
            try:
                image = self.source.read(number)
            except BadImage as error:
                piece.bad[number] = error.reason
                continue
            size = (image.shape[1], image.shape[2])
            if size != self.size:
                piece.sizes[number] = size
                image = resize(image, list(self.size), antialias=True)
            piece.pixels[place] = image
        return piece


def decode_in_pieces(source: ImageSource, size: tuple[int, int], workers: int = 0) -> Iterator[Piece]:
    """All images of a source in order, decoded by processes; without workers by threads, which suit large images alone."""
    pixels = size[0] * size[1]
    at_a_time = max(1, min(MOST_IMAGES_A_PIECE, BYTES_A_PIECE // (3 * pixels)))
    spans = [range(at, min(at + at_a_time, len(source))) for at in range(0, len(source), at_a_time)]
    workers = min(workers, len(source) * pixels // PIXELS_A_WORKER)
    if not workers:
        return _read_in_threads(_Pieces(source, size), spans, min(usable_cores(), 1 + pixels // PIXELS_A_THREAD))
    return iter(
        DataLoader(
            _Pieces(source, size),
            sampler=spans,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            worker_init_fn=ignore_signals,
            # Without one of its own, the start of the workers would move the global generator.
            generator=torch.Generator(),
        )
    )


def _as_it_is(piece: Any) -> Any:
    return piece


def _read_in_threads(pieces: _Pieces, spans: list[range], threads: int) -> Iterator[Piece]:
    if threads == 1:
        yield from map(pieces.__getitem__, spans)
        return
    waiting: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for span in spans:
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(pieces.__getitem__, span))
        while waiting:
            yield waiting.popleft().result()


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ignore_signals(worker: int) -> None:
    """Leave interruptions of a worker process to the main one."""
    # Ctrl-C, and SIGTERM from timeout or Slurm, reach the whole process group: the main process saves, and ends its
    # workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Record:
    """What the file of pixels beside it must be, and what else is known of the images."""

    shape: tuple[int, ...]
    checksum: int
    bad: Mapping[int, str]
    """Why an image could not be read, by its number: its row is black."""
    sizes: Mapping[int, tuple[int, int]]
    """The size of an image that was squashed."""


@dataclass(frozen=True)
class DecodedImages:
    """All images of a source as they lie in the cache."""

    record: Record
    pixels: UInt8[Tensor, "n 3 height width"]
    fresh: bool
    """Whether this process has decoded them just now."""


def decoded_images(
    source: ImageSource, size: tuple[int, int], workers: int = 0, progress: Progress | None = None
) -> DecodedImages | None:
    """The images of a source from the cache, decoded first where nobody has; None where they are not to be kept there.

    Of several processes one decodes, and the others wait for it. Where the cache cannot be written a warning says so.
    """
    shape = (len(source), 3, *size)
    needed = int(np.prod(shape))
    if not LEAST_CACHED_BYTES <= needed <= decoded_limit():
        return None
    key = digest([VERSION, source.fingerprint(), shape, getattr(source, "max_pixels", None)])
    file = cache_folder() / "decoded" / f"{key}.npy"
    found = _read(file, shape, source)
    if found is None:
        try:
            with _locked(file):
                found = _read(file, shape, source)
                if found is None:
                    _require_room(file.parent, needed)
                    _write(file, shape, source, workers, progress)
                    found = _read(file, shape, source, fresh=True)
        except OSError as error:
            warnings.warn(
                f"Decoded images cannot be kept in {file.parent} ({error.strerror or error}), and every run decodes them: "
                "set STOP_MIM_CACHE to a folder with room, or STOP_MIM_DECODED_GIB to 0.",
                stacklevel=2,
            )
            return None
    return found


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(file: Path, shape: tuple[int, ...], source: ImageSource, workers: int, progress: Progress | None) -> None:
    bad: dict[int, str] = {}
    sizes: dict[int, tuple[int, int]] = {}
    checksum = 0

    def write(draft: Path) -> None:
        nonlocal checksum
        # Written, and not mapped: a full disk is then an error and not the end of the process.
        with draft.open("wb") as stream:
            np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for piece in decode_in_pieces(source, (shape[2], shape[3]), workers):
                rows = piece.pixels.numpy()
                stream.write(rows.data)
                checksum = zlib.crc32(rows.data, checksum)
                bad.update(piece.bad)
                sizes.update(piece.sizes)
                if progress is not None:
                    progress(piece.first + len(rows), len(source))

    write_atomically(file, write)
    text = json.dumps(asdict(Record(shape, checksum, bad, sizes)))
    write_atomically(file.with_suffix(".json"), lambda draft: draft.write_text(text + "\n"))


def _read(file: Path, shape: tuple[int, ...], source: ImageSource, fresh: bool = False) -> DecodedImages | None:
    """What lies there, if all of it is as it was written and images that were bad still are."""
    try:
        record = _record(json.loads(file.with_suffix(".json").read_text()))
        # Copy on write: torch warns of memory that must not be written.
        rows = np.load(file, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if (
        rows.shape != shape
        or rows.dtype != np.uint8
        or record.shape != shape
        or zlib.crc32(rows.data) != record.checksum
    ):
        return None
    # What kept a file from being read, such as a network, may be over.
    if any(_is_readable(source, index) for index in record.bad):
        return None
    return DecodedImages(record, torch.from_numpy(rows), fresh)


def _record(plain: Mapping[str, Any]) -> Record:
    return Record(
        tuple(plain["shape"]),
        plain["checksum"],
        {int(index): str(reason) for index, reason in plain["bad"].items()},
        {int(index): (size[0], size[1]) for index, size in plain["sizes"].items()},
    )


def _is_readable(source: ImageSource, index: int) -> bool:
    try:
        source.read(index)
    except (BadImage, IndexError):
        return False
    return True


class DecodedSource(ImageSource):
    """A source whose images come from the cache when they are asked for, if they have the size that they seem to have."""

    def __init__(
        self, source: ImageSource, size: tuple[int, int], workers: int = 0, progress: Progress | None = None
    ) -> None:
        super().__init__(source.name, source.labels, source.class_names)
        self.source, self._common, self._workers, self._progress = source, size, workers, progress
        self._decoded: list[DecodedImages | None] = []

    def __len__(self) -> int:
        return len(self.source)

    def decoded(self) -> DecodedImages | None:
        """The images in the cache, decoded at the first call; None where they are not kept there."""
        if not self._decoded:
            self._decoded.append(decoded_images(self.source, self._common, self._workers, self._progress))
        return self._decoded[0]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""
        found = self.decoded()
        if found is None or index in found.record.sizes or not 0 <= index < len(self):
            return self.source.read(index)
        if index in found.record.bad:
            raise BadImage(self.describe(index), found.record.bad[index])
        return found.pixels[index].clone()

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image; raises BadImage."""
        return self.source.size(index)

    def describe(self, index: int) -> str:
        """Where the image lies."""
        return self.source.describe(index)

    def image_name(self, index: int) -> str:
        """What a list of images calls this one."""
        return self.source.image_name(index)

    def fingerprint(self) -> str:
        """That of the source."""
        return self.source.fingerprint()

    def stacked(self) -> UInt8[Tensor, "n 3 height width"] | None:
        """All the images, if they are in the cache, good and of one size."""
        found = self.decoded()
        return None if found is None or found.record.bad or found.record.sizes else found.pixels

    def __getstate__(self) -> dict[str, Any]:
        """Without the pixels, which another process maps itself, and without what shows the progress."""
        return {**self.__dict__, "_decoded": [], "_progress": None}
