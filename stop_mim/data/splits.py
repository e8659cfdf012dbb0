"""Names of splits, and which split is used where the wanted one is missing."""

from collections.abc import Collection

from stop_mim.errors import InputError

_TRAIN = ("train",)
_EVALUATION = ("test", "validation", "valid", "val")
SPLIT_NAMES = frozenset(_TRAIN + _EVALUATION)


class NoSplit(InputError):
    """The dataset has no such split."""


def split_candidates(split: str) -> tuple[str, ...]:
    """Return the names to try for a split, best first: test falls back to validation, and the other way round."""
    if split == "test":
        return _EVALUATION
    return (split, "validation", "valid", "val", "test") if split in _EVALUATION else (split,)


def choose_split(split: str, present: Collection[str], name: str) -> str:
    """Return the present split that is meant; raise InputError if there is none."""
    for candidate in split_candidates(split):
        if candidate in present:
            return candidate
    raise NoSplit(f"{name} has no split '{split}': choose one of {', '.join(sorted(present))}.")


def are_splits(names: Collection[str]) -> bool:
    """Whether sub-folders of these names are splits; "train" alone among other names may be a class."""
    return "train" in names and (set(names) == {"train"} or any(name in names for name in _EVALUATION))
