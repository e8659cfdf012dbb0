"""The classification datasets of torchvision, by the name of their class."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import UInt8
from torch import Tensor
from torchvision import datasets

from stop_mim.data.cache import download_folder
from stop_mim.data.decode import BadImage, check_pixels, quieten_pillow, rgb_pixels
from stop_mim.data.image_source import ImageSource, class_labels, digest
from stop_mim.data.sources import NoSplit, source, split_candidates
from stop_mim.errors import InputError, first_line

# Attributes with the targets in torchvision's classes: reading them avoids decoding images for their labels.
_TARGET_ATTRIBUTES = ("targets", "labels", "_labels", "y")
_CLASS_NAME_ATTRIBUTES = ("classes", "categories")
_TRAIN_SPLITS = ("train", "trainval", "train-standard")

# These have a split called test, but no labels for it.
_LABELLED_TEST_SPLITS = {"Places365": ("val",), "CLEVRClassification": ("val",)}


@source("torchvision", help="torchvision:NAME", prefix="torchvision:")
def open_torchvision(class_name: str, split: str) -> ImageSource:
    """Open a classification dataset of torchvision."""
    return TorchvisionSource(f"torchvision:{class_name}", *_open(class_name, split))


class TorchvisionSource(ImageSource):
    """One split of a torchvision dataset of (image, class) pairs; other datasets are an InputError."""

    def __init__(self, name: str, dataset: Any, split: str) -> None:
        _check_pairs(name, dataset)
        super().__init__(name, class_labels(_targets(dataset)), _class_names(dataset))
        self._dataset, self.split = dataset, split

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        quieten_pillow()
        try:
            image = self._dataset[index][0]
            check_pixels(image.height, image.width)
            return rgb_pixels(image)
        # Pillow raises many kinds of exceptions for corrupt files.
        except Exception as error:
            raise BadImage(self.describe(index), first_line(error)) from error

    def describe(self, index: int) -> str:
        return f"{self.name}[{self.split}]#{index}"

    def fingerprint(self, times: bool = True) -> str:
        labels = self.labels["class"].tobytes() if self.labels else b""
        ends = (self.read(index).numpy().tobytes() for index in (0, len(self) - 1))
        return digest([self.name, len(self), labels, *ends])


def _open(class_name: str, split: str) -> tuple[Any, str]:
    generic = (datasets.VisionDataset, datasets.DatasetFolder, datasets.ImageFolder)
    found = {name: kind for name, kind in vars(datasets).items() if inspect.isclass(kind) and kind not in generic}
    known = {name: kind for name, kind in found.items() if issubclass(kind, datasets.VisionDataset)}
    if class_name not in known:
        close = get_close_matches(class_name, known, cutoff=0.4) or ["CIFAR100"]
        raise InputError(f"torchvision has no dataset '{class_name}': did you mean {' or '.join(close)}?")
    kind = known[class_name]
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"root": str(download_folder())} if "root" in parameters else {}
    if "train" in parameters:
        return _construct(class_name, kind, options | {"train": split == "train"}), split
    if "split" not in parameters:
        return _construct(class_name, kind, options), split
    candidates = _TRAIN_SPLITS if split == "train" else split_candidates(split)
    if split in split_candidates("test"):
        candidates = _LABELLED_TEST_SPLITS.get(class_name, candidates)
    for candidate in candidates:
        with suppress(NoSplit):
            return _construct(class_name, kind, options | {"split": candidate}), candidate
    raise NoSplit(f"torchvision:{class_name} has no split '{split}': choose another split or dataset.")


def _construct(class_name: str, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    downloads = "download" in inspect.signature(kind).parameters
    # First without download: with it, some classes check or unpack whole archives each time.
    attempts = [{"download": False}, {"download": True}] if downloads else [{}]
    failure = Exception()
    for attempt in attempts:
        try:
            return kind(**options, **attempt)
        # Each server has its own failures.
        except Exception as error:
            if isinstance(error, ValueError) and "split" in options and "split" in str(error):
                raise NoSplit(first_line(error)) from error
            failure = error
    raise InputError(
        f"torchvision:{class_name} could not be opened in {download_folder()} ({first_line(failure)}): check the network, or "
        "put the data there (STOP_MIM_DATA names another folder)."
    ) from failure


def _check_pairs(name: str, dataset: Any) -> None:
    try:
        first: Any = dataset[0] if len(dataset) else None
    # Some classes open without looking for their images.
    except Exception as error:
        raise InputError(
            f"The first image of {name} cannot be read ({first_line(error)}): put its images in {download_folder()} "
            "(STOP_MIM_DATA names another folder)."
        ) from error
    pair = isinstance(first, tuple) and len(first) == 2
    if not pair or not isinstance(first[0], PIL.Image.Image) or not isinstance(first[1], int | np.integer):
        raise InputError(
            f"{name} does not give pairs of an image and a class: choose a dataset for classification, such as "
            "torchvision:CIFAR100."
        )


def _targets(dataset: Any) -> np.ndarray:
    first, samples = int(dataset[0][1]), getattr(dataset, "_samples", None)
    candidates = [getattr(dataset, attribute, None) for attribute in _TARGET_ATTRIBUTES]
    candidates.append(None if samples is None else [label for _, label in samples])
    for targets in candidates:
        if targets is not None and len(targets) == len(dataset) and int(targets[0]) == first:
            return np.asarray(targets, dtype=np.int64)
    return np.array([int(dataset[index][1]) for index in range(len(dataset))], dtype=np.int64)


def _class_names(dataset: Any) -> tuple[str, ...]:
    for attribute in _CLASS_NAME_ATTRIBUTES:
        if names := getattr(dataset, attribute, None):
            return tuple(name if isinstance(name, str) else ", ".join(name) for name in names)
    return ()
