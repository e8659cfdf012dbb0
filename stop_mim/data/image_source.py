"""The base class of all image datasets, and the list of images that cannot be read."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from stop_mim.data.decode import BadImage, OpenedImage, decode_image, image_size
from stop_mim.errors import InputError, printable
from stop_mim.files import append_line

Labels = dict[str, np.ndarray]
"""A label of each image, by the name of the label: "class", or "count" and "distance"."""

SIZES_LOOKED_AT = 256
MAX_BAD_FRACTION = 0.01
SHOWN_ONE_BY_ONE = 5
UNREAD_PHOTOS = frozenset({".heic", ".heif", ".avif", ".dng", ".cr2", ".cr3", ".nef", ".arw"})
"""Extensions of photographs that cannot be read."""


class ImageSource(ABC):
    """Images by index, from 0, with labels for all of them or for none; can be pickled.

    A subclass defines `encoded` if its images are stored in a file format, otherwise `read`.
    """

    layout = ""
    """Name of the published layout that the data have, such as "places205"; "" if none."""
    ignored: Mapping[str, int] = {}
    """Number of files that are not used, by extension or description."""
    blocks: Int[np.ndarray, " blocks"] | None = None
    """End index of each block of remote images, which is fetched as a whole; None if images can be read one by one."""
    no_labels = ""
    """Why the images have no labels, if that needs an explanation."""

    def __init__(self, name: str, labels: Labels | None = None, class_names: tuple[str, ...] = ()) -> None:
        self.name, self.class_names = name, class_names
        self.labels: Labels = labels or {}

    @abstractmethod
    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """Where the image is stored, for errors and the list of bad images."""
        return f"{self.name}#{index}"

    @abstractmethod
    def fingerprint(self, times: bool = True) -> str:
        """A short hexadecimal name of the contents: it changes when the data change.

        Without `times` it ignores modification times and reads more bytes, so that a copy of the data has the same name.
        """

    def image_name(self, index: int) -> str:
        """The name of the image in lists of images: its file's name where it has one, with / between folders."""
        return str(index)

    def fetch(self, block: int) -> object:
        """Fetch a block ahead of its use."""
        return None

    def encoded(self, index: int) -> bytes | None:
        """The image as it is stored, or None if it is not stored in a file format; raises BadImage."""
        return None

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""
        return decode_image(self.encoded(index) or b"", self.describe(index))

    def enlarged(self, index: int, side: int) -> UInt8[Tensor, "3 height width"]:
        """The image, or the first good one after it, for figures; synthetic images are rendered with that side."""
        return read_or_next(self, index)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, without decoding it where there is a header; raises BadImage."""
        encoded = self.encoded(index)
        if encoded is None:
            _, height, width = self.read(index).shape
            return height, width
        return image_size(encoded, self.describe(index))

    def open(self, index: int) -> OpenedImage:
        """The image with its size; a usual JPEG is decoded later. Raises BadImage."""
        encoded = self.encoded(index)
        if encoded is None:
            return OpenedImage.of_pixels(self.read(index).permute(1, 2, 0))
        return OpenedImage.of(encoded, self.describe(index))

    def stacked(self) -> UInt8[Tensor, "n 3 height width"] | None:
        """All images, if they are in memory and decoded."""
        return None


def first_good(source: ImageSource, index: int) -> tuple[OpenedImage, list[str]]:
    """Return the image, or the first good one after it, decoded, with the descriptions of the bad ones."""
    bad: list[str] = []
    for offset in range(len(source)):
        try:
            opened = source.open((index + offset) % len(source))
            return OpenedImage.of_pixels(opened.decode()), bad
        except BadImage as error:
            bad.append(str(error))
    raise no_good_images(source.name, len(source))


def no_good_images(name: str, count: int) -> InputError:
    """Return the error for a dataset of which no image can be read."""
    return InputError(f"None of the {count} images of '{name}' can be read: check the data.")


def read_or_next(source: ImageSource, index: int) -> UInt8[Tensor, "3 height width"]:
    """Return the image, or the first good one after it."""
    return first_good(source, index)[0].decode().permute(2, 0, 1)


def common_size(source: ImageSource, images: np.ndarray | None = None) -> tuple[int, int] | None:
    """Return the size of all images (or of some), judged by up to 256 of them; None if sizes differ or images are remote."""
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


def class_labels(classes: np.ndarray | None) -> Labels:
    """Return the labels of a classification set; {} where an image has none (-1), as in the test splits of challenges."""
    if classes is None or not len(classes) or (classes < 0).any():
        return {}
    return {"class": classes.astype(np.int64)}


class BadImages:
    """The bad images of a dataset, by description; the list in `file`, one per line, is continued on resume.

    More than `max_fraction` of all images is an InputError; None: 1%, which the user cannot change. `show` shows each of the
    first ones.
    """

    def __init__(
        self,
        source_name: str,
        total: int,
        file: Path | None = None,
        max_fraction: float | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.source_name, self.total, self.file, self.show = source_name, total, file, show
        self.max_fraction = MAX_BAD_FRACTION if max_fraction is None else max_fraction
        self.fixed = max_fraction is None
        self._known = set(file.read_text().splitlines() if file is not None and file.exists() else [])

    def __len__(self) -> int:
        return len(self._known)

    def add(self, description: str) -> None:
        """Add an image, unless it is known; raise InputError if there are too many."""
        line = printable(" ".join(description.split()))
        listed = f" (listed in {self.file})" if self.file is not None else ""
        if line not in self._known:
            self._known.add(line)
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                append_line(self.file, line)
            if self.show is not None and len(self._known) <= SHOWN_ONE_BY_ONE:
                more = f"; more are not shown{listed}" if len(self._known) == SHOWN_ONE_BY_ONE else ""
                self.show(f"skipped    {line}{more}")
        if len(self._known) > self.max_fraction * self.total:
            enough = min(100, 100 * len(self._known) // self.total + 1)
            remedy = "" if self.fixed else f", or start a run that allows more with --max-bad {enough}%"
            raise InputError(
                f"{len(self._known)} of the {self.total} images of '{self.source_name}' cannot be used{listed}, such as "
                f"{line}: more than {100 * self.max_fraction:g}% is an error; repair or remove them{remedy}."
            )


def skipped(unreadable: int, ignored: Mapping[str, int]) -> str:
    """Describe the files of a dataset that are not used: "1 unreadable; ignored: 2 .png.bak, 1 .txt"; "" if there are none."""
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    files = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in kinds)
    photos = " and ".join(kind for kind, _ in kinds if kind in UNREAD_PHOTOS)
    parts = [
        f"{unreadable:,} unreadable" if unreadable else "",
        f"ignored: {files}" if files else "",
        f"convert {photos} files to JPEG to use them" if photos else "",
    ]
    return "; ".join(filter(None, parts))


def digest(parts: Iterable[object]) -> str:
    """Return sixteen hexadecimal digits that depend on the parts' texts and their order."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape"))
        state.update(b"\0")
    return state.hexdigest()[:16]
