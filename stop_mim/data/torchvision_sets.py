"""The classification data sets of torchvision, by the name of their class."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import UInt8
from torch import Tensor
from torchvision import datasets

from stop_mim.data.cache import download_folder
from stop_mim.data.image_source import ImageSource, class_labels, digest
from stop_mim.data.images import MAX_PIXELS, BadImage, quieten_pillow, rgb_pixels
from stop_mim.data.splits import split_candidates
from stop_mim.errors import InputError

# Where the classes of torchvision keep their targets, so that no image need be decoded to learn its label.
_TARGET_ATTRIBUTES = ("targets", "labels", "_labels", "y")
_CLASS_NAME_ATTRIBUTES = ("classes", "categories")
_TRAIN_SPLITS = ("train", "trainval", "train-standard")


class TorchvisionSource(ImageSource):
    """One split of a torchvision data set that gives pairs of an image and a class; others are refused."""

    def __init__(self, class_name: str, split: str, max_pixels: int = MAX_PIXELS) -> None:
        self._dataset, self.split = _open(class_name, split)
        _check_pairs(class_name, self._dataset)
        labels = class_labels(_targets(self._dataset))
        super().__init__(f"torchvision:{class_name}", labels, _class_names(self._dataset))
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB; raises BadImage."""
        return rgb_pixels(self._image(index))

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, which torchvision decodes for it; raises BadImage."""
        image = self._image(index)
        return image.height, image.width

    def describe(self, index: int) -> str:
        """The data set, the split and the position."""
        return f"{self.name}[{self.split}]#{index}"

    def fingerprint(self) -> str:
        """Depends on the name, the number of images, all labels, and the first and the last image."""
        labels = self.labels["class"].tobytes() if self.labels else b""
        ends = (self.read(index).numpy().tobytes() for index in (0, len(self) - 1))
        return digest([self.name, len(self), labels, *ends])

    def _image(self, index: int) -> PIL.Image.Image:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} images, and no image {index}")
        quieten_pillow()
        try:
            image = self._dataset[index][0]
        # Pillow answers corrupt files with many kinds of exceptions.
        except Exception as error:
            raise BadImage(self.describe(index), (str(error) or type(error).__name__).splitlines()[0]) from error
        if image.width * image.height > self.max_pixels:
            raise BadImage(
                self.describe(index), f"{image.width}x{image.height} of more than {self.max_pixels:,} pixels"
            )
        return image


def _open(class_name: str, split: str) -> tuple[Any, str]:
    known = {name: getattr(datasets, name) for name in dir(datasets)}
    known = {name: kind for name, kind in known.items() if inspect.isclass(kind) and _is_named_set(kind)}
    if class_name not in known:
        close = get_close_matches(class_name, known, cutoff=0.4) or ["CIFAR100"]
        raise InputError(f"torchvision has no data set '{class_name}': did you mean {' or '.join(close)}?")
    kind = known[class_name]
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"root": str(download_folder())} if "root" in parameters else {}
    if "train" in parameters:
        return _construct(class_name, kind, options | {"train": split == "train"}), split
    if "split" not in parameters:
        return _construct(class_name, kind, options), split
    for candidate in _TRAIN_SPLITS if split == "train" else split_candidates(split):
        try:
            return _construct(class_name, kind, options | {"split": candidate}), candidate
        except _UnknownSplit:
            continue
    raise InputError(f"torchvision:{class_name} has no split '{split}': choose another split or data set.")


class _UnknownSplit(Exception):
    """The class of torchvision has no split of this name."""


def _is_named_set(kind: type) -> bool:
    generic = (datasets.VisionDataset, datasets.DatasetFolder, datasets.ImageFolder)
    return issubclass(kind, datasets.VisionDataset) and kind not in generic


def _construct(class_name: str, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    downloads = "download" in inspect.signature(kind).parameters
    # Without asking for a download first: with it, some classes check or unpack whole archives each time.
    attempts = [{"download": False}, {"download": True}] if downloads else [{}]
    failure: Exception | None = None
    for attempt in attempts:
        try:
            return kind(**options, **attempt)
        except ValueError as error:
            if "split" in options and "split" in str(error):
                raise _UnknownSplit from error
            failure = error
        # Downloads fail in as many ways as there are servers.
        except Exception as error:
            failure = error
    reason = " ".join(str(failure).split()).rstrip(".")
    raise InputError(
        f"torchvision:{class_name} could not be opened in {download_folder()} ({reason}): check the network, or put "
        "the data there (STOP_MIM_DATA names another folder)."
    ) from failure


def _check_pairs(class_name: str, dataset: Any) -> None:
    first: Any = dataset[0] if len(dataset) else None
    pair = isinstance(first, tuple) and len(first) == 2
    if not pair or not isinstance(first[0], PIL.Image.Image) or not isinstance(first[1], int | np.integer):
        raise InputError(
            f"torchvision:{class_name} does not give pairs of an image and a class: choose a data set for "
            "classification, such as torchvision:CIFAR100."
        )


def _targets(dataset: Any) -> np.ndarray:
    for attribute in _TARGET_ATTRIBUTES:
        targets = getattr(dataset, attribute, None)
        if targets is not None and len(targets) == len(dataset) and int(targets[0]) == int(dataset[0][1]):
            return np.asarray(targets, dtype=np.int64)
    samples = getattr(dataset, "_samples", None)
    if samples is not None and len(samples) == len(dataset) and samples[0][1] == dataset[0][1]:
        return np.array([label for _, label in samples], dtype=np.int64)
    return np.array([int(dataset[index][1]) for index in range(len(dataset))], dtype=np.int64)


def _class_names(dataset: Any) -> tuple[str, ...]:
    for attribute in _CLASS_NAME_ATTRIBUTES:
        if names := getattr(dataset, attribute, None):
            return tuple(name if isinstance(name, str) else ", ".join(name) for name in names)
    return ()
