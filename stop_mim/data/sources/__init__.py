"""Kinds of datasets, one file each: `open_source` finds the kind that a name belongs to and opens it.

A new kind is a class in a file here, or in a plugin, with the decorator `@SOURCES.register`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from stop_mim.data.data_files import is_url
from stop_mim.data.image_source import ImageSource
from stop_mim.errors import InputError
from stop_mim.registry import Registry

_EVALUATION = ("test", "validation", "valid", "val")
SPLIT_NAMES = frozenset(("train", *_EVALUATION))


class SourceKind(ABC):
    """A kind of dataset: which names belong to it, and how they are opened."""

    help: ClassVar[str]
    """The names of this kind, such as "torchvision:NAME", for help and errors."""
    prefix: ClassVar[str] = ""
    """What names of this kind begin with; a kind without a prefix overrides `matches`."""
    is_general: ClassVar[bool] = False
    """Whether more special kinds are tried first."""
    is_path: ClassVar[bool] = False
    """Whether a name, after its prefix, is a path."""

    @classmethod
    def matches(cls, name: str) -> bool:
        """Whether this kind opens the name."""
        return name.startswith(cls.prefix) and len(name) > len(cls.prefix) > 0

    @classmethod
    @abstractmethod
    def open(cls, name: str, split: str) -> ImageSource:
        """Open the dataset; one without splits is the same data for each split."""


SOURCES: Registry[type[SourceKind]] = Registry("kind of dataset", "stop_mim.data.sources")


def open_source(name: str, split: str = "train") -> ImageSource:
    """Open the dataset of this name; one without splits is the same data for each split."""
    return find_kind(name).open(name, split)


def absolute_name(name: str) -> str:
    """Return the name of a dataset with an absolute path, if it is a path, so that it is valid in any directory."""
    kind = find_kind(name)
    path = name.removeprefix(kind.prefix)
    return kind.prefix + os.path.abspath(os.path.expanduser(path)) if kind.is_path and not is_url(path) else name


def is_dataset(name: str) -> bool:
    """Whether some kind opens the name."""
    return any(kind.matches(name) for kind in SOURCES.values())


def find_kind(name: str) -> type[SourceKind]:
    """Return the kind that a name belongs to; raise InputError if there is none."""
    for kind in sorted(SOURCES.values(), key=lambda kind: kind.is_general):
        if kind.matches(name):
            return kind
    kinds = ", ".join(dict.fromkeys(kind.help for kind in SOURCES.values()))
    raise InputError(f"There is no dataset '{name}': give one of {kinds}.")


class NoSplit(InputError):
    """The dataset has no such split."""


def split_candidates(split: str) -> tuple[str, ...]:
    """Return the names to try for a split, best first: test falls back to validation, and the other way round."""
    if split == "test":
        return _EVALUATION
    return (split, "validation", "valid", "val", "test") if split in _EVALUATION else (split,)


def choose_split(split: str, present: Collection[str], name: str) -> str:
    """Return the first candidate of the split that is present; raise InputError if there is none."""
    for candidate in split_candidates(split):
        if candidate in present:
            return candidate
    raise NoSplit(f"{name} has no split '{split}': choose one of {', '.join(sorted(present))}.")


def are_splits(names: Collection[str]) -> bool:
    """Whether sub-folders of these names are splits; "train" alone among other names may be a class."""
    return "train" in names and (set(names) == {"train"} or any(name in names for name in _EVALUATION))
