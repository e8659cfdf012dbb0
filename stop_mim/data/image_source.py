"""The base class of all datasets of images."""

import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from stop_mim.data.decode import BadImage, OpenedImage, decode_image, image_size
from stop_mim.errors import InputError

SIZES_LOOKED_AT = 256


class ImageSource(ABC):
    """Images by index, with labels for all of them or for none; can be pickled.

    A subclass defines `encoded` if its images are stored in a file format, otherwise `read` and `size`.
    """

    layout = ""
    """Name of the published layout that the data have, such as "places205"; "" if none."""
    ignored: Mapping[str, int] = {}
    """What was left out: how many files there are of each extension that is no image's, or of another kind in words."""
    blocks: Int[np.ndarray, " blocks"] | None = None
    """The end of each part that is fetched as a whole, where images are far away; None if any image can be read at once."""
    no_labels = ""
    """Why the images have no labels, where that needs a reason."""

    def __init__(
        self, name: str, labels: dict[str, np.ndarray] | None = None, class_names: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.labels: dict[str, np.ndarray] = labels or {}
        self.class_names = class_names

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where the image is stored, for a list of bad images."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hexadecimal name of the contents: it changes when the data change."""

    def contents(self) -> str:
        """Like `fingerprint`, but the same for a copy of the data: it depends on names, sizes and bytes, not on times."""
        return self.fingerprint()

    def image_name(self, index: int) -> str:
        """The name of the image in lists of images: its file's name where it has one, with / between folders."""
        return str(index)

    def fetch(self, indices: Int[np.ndarray, " n"]) -> None:
        """Bring the blocks of these images near, ahead of their use."""
        return None

    def encoded(self, index: int) -> bytes | None:
        """The image as it is stored, or None if it is not stored in a file format; raises BadImage."""
        return None

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""
        return decode_image(self._checked(index), self.describe(index))

    def enlarged(self, index: int, side: int) -> UInt8[Tensor, "3 height width"]:
        """The image, or the first good one after it, for people to look at: what is drawn is drawn with that side."""
        return read_or_next(self, index)[0]

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, without decoding it where there is a header; raises BadImage."""
        return image_size(self._checked(index), self.describe(index))

    def open(self, index: int) -> OpenedImage:
        """The image with its size, decoded only if need be; raises BadImage."""
        encoded = self.encoded(index)
        if encoded is None:
            return OpenedImage.of_pixels(self.read(index).permute(1, 2, 0))
        return OpenedImage.of(encoded, self.describe(index))

    def stacked(self) -> UInt8[Tensor, "n 3 height width"] | None:
        """All images, if they are in memory and decoded."""
        return None

    def check_index(self, index: int) -> None:
        """Raise IndexError for an index outside the source, negative ones included."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} images, and no image {index}")

    def _checked(self, index: int) -> bytes:
        self.check_index(index)
        return self.encoded(index) or b""


def first_good(source: ImageSource, index: int) -> tuple[OpenedImage, list[str]]:
    """Return the image, or the first good one after it, decoded, with the descriptions of the bad ones."""
    bad: list[str] = []
    for offset in range(len(source)):
        try:
            opened = source.open((index + offset) % len(source))
            return OpenedImage.of_pixels(opened.decode()), bad
        except BadImage as error:
            bad.append(str(error))
    raise InputError(f"None of the {len(source)} images of '{source.name}' can be read: check the data.")


def read_or_next(source: ImageSource, index: int) -> tuple[UInt8[Tensor, "3 height width"], list[str]]:
    """Return the image, or the first good one after it, and the descriptions of the bad ones in between."""
    opened, bad = first_good(source, index)
    return opened.decode().permute(2, 0, 1), bad


def common_size(source: ImageSource, images: np.ndarray | None = None) -> tuple[int, int] | None:
    """Return the size of all images (or of some), judged by up to 256 evenly spread ones.

    None if sizes differ, or if the images are far away.
    """
    if source.blocks is not None:
        return None
    numbers = np.arange(len(source)) if images is None else images
    sizes = set()
    for index in numbers[:: max(1, len(numbers) // SIZES_LOOKED_AT)].tolist():
        try:
            sizes.add(source.size(index))
        except BadImage:
            continue
        if len(sizes) > 1:
            return None
    return sizes.pop() if sizes else None


def class_labels(classes: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the labels of a classification set; {} where an image has none (-1), as in the test splits of challenges."""
    if classes is None or not len(classes) or (classes < 0).any():
        return {}
    return {"class": classes.astype(np.int64)}


def file_state(path: Path | str) -> tuple[int, int]:
    """Return a file's size and time of change; (-1, -1) if it cannot be found. A pipe or a device is an InputError."""
    try:
        state = os.stat(path)
    except OSError:
        return -1, -1
    if not stat.S_ISREG(state.st_mode):
        raise InputError(f"{path} cannot be read: it is a pipe, a device or a folder; give a file.")
    return state.st_size, state.st_mtime_ns


def read_file(path: Path | str, name: str, before: tuple[int, int] | None, offset: int = 0, size: int = -1) -> bytes:
    """Return bytes of a file; raise BadImage of that name, or InputError if the file is not what it was before.

    Args:
        path: the file.
        name: of the image in it.
        before: the state of the file when the data were opened; None if it may change.
        offset: of the first byte.
        size: number of bytes; default: all.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(size)
            # After the bytes were read, so that a file that is being written is noticed too.
            state = os.fstat(file.fileno())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and before not in (None, (-1, -1)):
            raise changed(path, "disappeared") from error
        raise BadImage(name, error.strerror or str(error)) from error
    if before not in (None, (state.st_size, state.st_mtime_ns)):
        raise changed(path)
    return content


def changed(file: object, how: str = "changed") -> InputError:
    """Return the error for a file that is no longer what it was when the data were opened."""
    return InputError(
        f"{file} has {how} since the data were opened: restore it and resume the run, or start a new one."
    )


def digest(parts: Iterable[object]) -> str:
    """Return sixteen hexadecimal digits that depend on the parts' texts and their order."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape"))
        state.update(b"\0")
    return state.hexdigest()[:16]
