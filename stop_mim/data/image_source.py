"""What every data set of images is to the rest of the package, wherever its images come from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data.images import decode_image, image_size


class ImageSource(ABC):
    """Images by index, with labels for all of them or for none; can be sent to the workers of a DataLoader."""

    def __init__(
        self, name: str, labels: dict[str, np.ndarray] | None = None, class_names: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.labels: dict[str, np.ndarray] = labels or {}
        self.class_names = class_names

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, without decoding it where there is a header; raises BadImage."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where the image lies, for a list of bad images."""

    def image_name(self, index: int) -> str:
        """What a list of images calls this one: the name of its file where it has one, with / between folders."""
        return str(index)

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hexadecimal name of the contents: it changes when the data change."""

    def stacked(self) -> UInt8[Tensor, "n 3 height width"] | None:
        """All the images, if they are in memory and decoded already."""
        return None


class EncodedSource(ImageSource):
    """A source whose images are files, or pieces of files, that have to be decoded."""

    max_pixels: int

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The image as it is stored; raises BadImage."""

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""
        self.check_index(index)
        return decode_image(self.encoded(index), self.describe(index), self.max_pixels)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, from its header; raises BadImage."""
        self.check_index(index)
        return image_size(self.encoded(index), self.describe(index))

    def check_index(self, index: int) -> None:
        """Raises IndexError for an index outside the source, negative ones included."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} images, and no image {index}")


def class_labels(classes: np.ndarray | None) -> dict[str, np.ndarray]:
    """The labels of a classification set; {} where an image has none (-1), as in the test splits of challenges."""
    if classes is None or not len(classes) or (classes < 0).any():
        return {}
    return {"class": classes.astype(np.int64)}


def digest(parts: Iterable[object]) -> str:
    """Sixteen hexadecimal digits that depend on the parts' texts and their order."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape"))
        state.update(b"\0")
    return state.hexdigest()[:16]
