"""Kinds of datasets, one file each: `open_source` finds the kind that a name belongs to and opens it.

A new kind is a function in a file here, or in a plugin, with the decorator `@source`.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from stop_mim.data.data_files import is_url
from stop_mim.data.image_source import ImageSource
from stop_mim.errors import InputError
from stop_mim.registry import Registry

_EVALUATION = ("test", "validation", "valid", "val")
SPLIT_NAMES = frozenset(("train", *_EVALUATION))

Opener = Callable[[str, str], ImageSource]
"""Opens a dataset by its name (without the prefix) and split; a dataset without splits is the same for each split."""


@dataclass(frozen=True)
class SourceKind:
    """A kind of dataset: which names belong to it, and how they are opened."""

    open: Opener
    help: str
    prefix: str
    matches: Callable[[str], bool]
    is_path: bool
    is_general: bool


SOURCES: Registry[SourceKind] = Registry("kind of dataset", "stop_mim.data.sources")


def source(
    kind: str,
    help: str,
    prefix: str = "",
    matches: Callable[[str], bool] | None = None,
    is_path: bool = False,
    is_general: bool = False,
) -> Callable[[Opener], Opener]:
    """Return a decorator that registers a function to open a kind of dataset.

    Args:
        kind: name of the kind.
        help: the names of this kind, such as "torchvision:NAME", for help and errors.
        prefix: what names of this kind begin with.
        matches: whether a name belongs to this kind; default: if it begins with the prefix.
        is_path: whether a name, after its prefix, is a path.
        is_general: whether more special kinds are tried first.
    """

    def register(function: Opener) -> Opener:
        found = matches or (lambda name: name.startswith(prefix) and len(name) > len(prefix) > 0)
        SOURCES.register(kind)(SourceKind(function, help, prefix, found, is_path, is_general))
        return function

    return register


def open_source(name: str, split: str = "train") -> ImageSource:
    """Open a dataset by name; a dataset without splits is the same for each split."""
    kind = find_kind(name)
    return kind.open(name.removeprefix(kind.prefix), split)


def absolute_name(name: str) -> str:
    """Return the name with an absolute path if it names a dataset by its path; any other name is returned as it is."""
    kind = _kind_of(name)
    if kind is None or not kind.is_path or is_url(path := name.removeprefix(kind.prefix)):
        return name
    return kind.prefix + os.path.abspath(os.path.expanduser(path))


def is_dataset(name: str) -> bool:
    """Whether some kind opens the name."""
    return _kind_of(name) is not None


def find_kind(name: str) -> SourceKind:
    """Return the kind that a name belongs to; raise InputError if there is none."""
    kind = _kind_of(name)
    if kind is None:
        kinds = ", ".join(dict.fromkeys(kind.help for kind in SOURCES.values()))
        raise InputError(f"There is no dataset '{name}': give one of {kinds}.")
    return kind


def _kind_of(name: str) -> SourceKind | None:
    kinds = sorted(SOURCES.values(), key=lambda kind: kind.is_general)
    # As a path, the empty name would be the current folder.
    return next((kind for kind in kinds if name and kind.matches(name)), None)


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
