"""The classification datasets of torchvision, by the name of their class and options of its constructor.

NAME or NAME,option=value, such as Places365,small=true; INaturalist is the version of 2018 unless another is named.
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import UInt8
from torch import Tensor
from torchvision import datasets

from stop_mim.data.cache import download_folder
from stop_mim.data.decode import BadImage, check_pixels, quieten_pillow, rgb_pixels
from stop_mim.data.image_source import ImageSource, class_labels, digest
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.data.sources.listed import INATURALIST_YEARS, inaturalist_annotations, open_inaturalist
from stop_mim.data.splits import NoSplit, split_candidates
from stop_mim.errors import InputError, first_line

# Where the classes of torchvision keep their targets, so that no image need be decoded to learn its label.
_TARGET_ATTRIBUTES = ("targets", "labels", "_labels", "y")
_CLASS_NAME_ATTRIBUTES = ("classes", "categories")
_TRAIN_SPLITS = ("train", "trainval", "train-standard")

# These have a split called test, but no labels for it.
_LABELLED_TEST_SPLITS = {"Places365": ("val",), "CLEVRClassification": ("val",)}

# Where the classes keep the paths of their images, and the folder that these are in, the most exact first.
_PATH_ATTRIBUTES = ("samples", "imgs", "_image_files", "_samples")
_FOLDER_ATTRIBUTES = ("split_folder", "images_dir", "_images_folder", "root")

_OWN_PARAMETERS = frozenset({"root", "split", "train", "download", "loader"})


@SOURCES.register("torchvision")
class TorchvisionKind(SourceKind):
    """A classification dataset of torchvision; older versions of iNaturalist by their annotations."""

    help, prefix = "torchvision:NAME", "torchvision:"

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        class_name, options = _parse(name.removeprefix(cls.prefix))
        year = options.get("version", INATURALIST_YEARS[0])
        if class_name != "INaturalist" or year not in INATURALIST_YEARS:
            return TorchvisionSource(name, *_open(class_name, split, options))
        if other := sorted(options.keys() - {"version"}):
            raise InputError(f"torchvision:INaturalist of {year} has no option '{other[0]}': give version alone.")
        images = download_folder() / year
        # Without annotations the download, of more than a hundred gigabytes, would be of no use.
        if not images.is_dir() and inaturalist_annotations(download_folder(), year):
            _construct(class_name, datasets.INaturalist, {"root": str(download_folder()), "version": year})
        return open_inaturalist(download_folder(), name, split, year, images)


class TorchvisionSource(ImageSource):
    """One split of a torchvision dataset that gives pairs of an image and a class; others are refused."""

    def __init__(self, name: str, dataset: Any, split: str) -> None:
        _check_pairs(name, dataset)
        super().__init__(name, class_labels(_targets(dataset)), _class_names(dataset))
        self._dataset, self.split = dataset, split

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        return rgb_pixels(self._image(index))

    def size(self, index: int) -> tuple[int, int]:
        image = self._image(index)
        return image.height, image.width

    def describe(self, index: int) -> str:
        return f"{self.name}[{self.split}]#{index}"

    def image_name(self, index: int) -> str:
        """The path within the dataset's folder of images, or the position if torchvision has no paths."""
        for attribute in _PATH_ATTRIBUTES:
            entries = getattr(self._dataset, attribute, None)
            if entries is not None and len(entries) == len(self):
                entry = entries[index][0] if isinstance(entries[index], tuple) else entries[index]
                if isinstance(entry, str | Path):
                    folders = (getattr(self._dataset, attribute, None) for attribute in _FOLDER_ATTRIBUTES)
                    inside = (one for one in folders if isinstance(one, str | Path) and Path(entry).is_relative_to(one))
                    return Path(entry).relative_to(next(inside, "")).as_posix()
        return str(index)

    def fingerprint(self) -> str:
        labels = self.labels["class"].tobytes() if self.labels else b""
        ends = (self.read(index).numpy().tobytes() for index in (0, len(self) - 1))
        return digest([self.name, len(self), labels, *ends])

    def _image(self, index: int) -> PIL.Image.Image:
        self.check_index(index)
        quieten_pillow()
        try:
            image = self._dataset[index][0]
            check_pixels(image.height, image.width)
            return image
        # Pillow answers corrupt files with many kinds of exceptions.
        except Exception as error:
            raise BadImage(self.describe(index), first_line(error)) from error


def _parse(name: str) -> tuple[str, dict[str, str]]:
    class_name, *parts = name.split(",")
    options: dict[str, str] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign or not value:
            raise InputError(f"The option '{part}' of torchvision:{class_name} has no value: give it as {key}=value.")
        options[key] = value
    return class_name, options


def _open(class_name: str, split: str, given: dict[str, str]) -> tuple[Any, str]:
    generic = (datasets.VisionDataset, datasets.DatasetFolder, datasets.ImageFolder)
    found = {name: kind for name, kind in vars(datasets).items() if inspect.isclass(kind) and kind not in generic}
    known = {name: kind for name, kind in found.items() if issubclass(kind, datasets.VisionDataset)}
    if class_name not in known:
        close = get_close_matches(class_name, known, cutoff=0.4) or ["CIFAR100"]
        raise InputError(f"torchvision has no dataset '{class_name}': did you mean {' or '.join(close)}?")
    kind = known[class_name]
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"root": str(download_folder())} if "root" in parameters else {}
    options |= _typed_options(class_name, parameters, given)
    if "train" in parameters:
        return _construct(class_name, kind, options | {"train": split == "train"}), split
    if "split" not in parameters:
        return _construct(class_name, kind, options), split
    candidates = _TRAIN_SPLITS if split == "train" else split_candidates(split)
    if split in split_candidates("test"):
        candidates = _LABELLED_TEST_SPLITS.get(class_name, candidates)
    for candidate in candidates:
        try:
            return _construct(class_name, kind, options | {"split": candidate}), candidate
        except _UnknownSplit:
            continue
    raise NoSplit(f"torchvision:{class_name} has no split '{split}': choose another split or dataset.")


def _typed_options(
    class_name: str, parameters: Mapping[str, inspect.Parameter], given: dict[str, str]
) -> dict[str, Any]:
    known = {
        key: type(parameter.default)
        for key, parameter in parameters.items()
        if isinstance(parameter.default, bool | int | str) and key not in _OWN_PARAMETERS
    }
    readers: dict[type, Callable[[str], Any]] = {bool: {"true": True, "false": False}.__getitem__, int: int, str: str}
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            choice = f"choose among {', '.join(known)}" if known else "it has none"
            raise InputError(f"torchvision:{class_name} has no option '{key}': {choice}.")
        try:
            options[key] = readers[known[key]](value.lower() if known[key] is bool else value)
        except (KeyError, ValueError) as error:
            wanted = "true or false" if known[key] is bool else "a whole number"
            raise InputError(f"The option {key} of torchvision:{class_name} is '{value}': give {wanted}.") from error
    return options


class _UnknownSplit(Exception):
    """The class of torchvision has no split of this name."""


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
    raise InputError(
        f"torchvision:{class_name} could not be opened in {download_folder()} ({_reason(failure)}): check the network, or "
        "put the data there (STOP_MIM_DATA names another folder)."
    ) from failure


def _reason(error: Exception | None) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _check_pairs(name: str, dataset: Any) -> None:
    try:
        first: Any = dataset[0] if len(dataset) else None
    # Some classes open without looking for their images.
    except Exception as error:
        raise InputError(
            f"The first image of {name} cannot be read ({_reason(error)}): put its images in {download_folder()} "
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
