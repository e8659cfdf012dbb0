"""Labelled subsets of a source: all images, a held-out part, a draw from each class, or a list in a file."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64

from stop_mim.data.decode import IMAGE_EXTENSIONS
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator

_SYNSET = re.compile(r"_n\d{8}$")


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Some images of a source, and the class of each."""

    source: ImageSource
    labels: np.ndarray
    """The class of every image of the source, from 0; -1 where an image outside the set has none."""
    indices: np.ndarray
    """Which images of the source belong to the set."""

    def __post_init__(self) -> None:
        missing = self.indices[self.labels[self.indices] < 0]
        if len(missing):
            which = f"{len(missing)} of the {len(self.indices)} chosen images of '{self.source.name}'"
            raise InputError(f"{which} have no label, such as {self.source.describe(int(missing[0]))}: leave them out.")

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def classes(self) -> np.ndarray:
        """The class of each image of the set, in the order of its indices."""
        return self.labels[self.indices].astype(np.int64)

    def part(self, positions: np.ndarray) -> "LabelledSet":
        """The subset of the images at these positions of the set."""
        return replace(self, indices=self.indices[positions])

    def fingerprint(self) -> str:
        """A short hexadecimal name: it changes with the images, their labels or the choice of them."""
        return digest([self.source.fingerprint(), self.indices.astype(np.int64).tobytes(), self.classes.tobytes()])


def hold_out(data: LabelledSet, part: float, most: int, seed: int) -> tuple[LabelledSet, LabelledSet]:
    """Split off a part with the same fraction of each class, leaving at least one image per class; return (rest, part)."""
    classes = data.classes
    shuffled = torch.randperm(len(data), generator=seeded_generator("cpu", seed, "held out")).numpy()
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    first_of_class = np.diff(classes[by_class], prepend=-1) != 0
    may_go = by_class[~first_of_class]
    count = min(most, max(1, round(part * len(data))), len(may_go))
    if not count:
        raise InputError(f"'{data.source.name}' has one image per class, so none can be held out: add images.")
    # Evenly spaced in the order of classes, so that each class gives in proportion to its images.
    held = may_go[((np.arange(count) + 0.5) * len(may_go) / count).astype(int)]
    remains = np.setdiff1d(np.arange(len(data)), held)
    return data.part(remains), data.part(np.sort(held))


def read_image_list(path: Path, source: ImageSource) -> Int64[np.ndarray, " k"]:
    """Return the indices of the images that a text file names, one per line, in its order.

    A line is an image's whole name ("n01440764/n01440764_10026.JPEG") or the name of its file alone
    ("n01440764_10026.JPEG"). The extension may differ or be missing, and so may the synset that ImageNet's parquet files
    append ("n01440764_10026_n01440764.JPEG"). Blank lines and lines that begin with # are skipped.
    """
    lines = _read_lines(path)
    # Only names that match a line are kept: a dataset may have millions.
    by_name: dict[str, list[int]] = {line: [] for line in lines}
    by_stem: dict[str, list[int]] = {_stem(line): [] for line in lines}
    for index in range(len(source)):
        name = source.image_name(index)
        stem = _stem(name)
        if name in by_name:
            by_name[name].append(index)
        for key in {stem, stem.rpartition("/")[2]} & by_stem.keys():
            by_stem[key].append(index)
    matches = {line: by_name[line] or by_stem[_stem(line)] for line in lines}
    if missing := [line for line, found in matches.items() if not found]:
        raise InputError(
            f"{len(missing)} of the {len(lines)} names in {path} are not in {source.name}, '{missing[0]}' first: give "
            "the list that belongs to these data."
        )
    line_of: dict[int, str] = {}
    for line in lines:
        first, *others = matches[line]
        if others:
            which = " and ".join(f"'{source.image_name(index)}' (image {index})" for index in (first, others[0]))
            raise InputError(f"The name '{line}' in {path} matches both {which} of {source.name}: give the whole name.")
        if (before := line_of.setdefault(first, line)) is not line:
            name = source.image_name(first)
            raise InputError(f"{path} names the image '{name}' twice, as '{before}' and as '{line}': remove one line.")
    return np.array(list(line_of), dtype=np.int64)


def draw_per_class(
    labels: Int[np.ndarray, " n"], per_class: int, seed: int, draw: int = 0, class_names: Sequence[str] = ()
) -> Int64[np.ndarray, " k"]:
    """Draw `per_class` images of each class, sorted; a larger draw of the same number contains the smaller ones."""

    def wanted(label: int, available: int) -> int:
        if available < per_class:
            name = f"{label} ({class_names[label]})" if 0 <= label < len(class_names) else str(label)
            raise InputError(
                f"The class {name} has {available} images, fewer than the {per_class} to draw from each class: draw fewer."
            )
        return per_class

    return _draw(labels, wanted, seed, draw)


def draw_fraction(labels: Int[np.ndarray, " n"], fraction: float, seed: int, draw: int = 0) -> Int64[np.ndarray, " k"]:
    """Draw a fraction of each class, at least one image, sorted; a larger draw contains the smaller ones."""
    return _draw(labels, lambda _, available: max(1, round(fraction * available)), seed, draw)


def _draw(labels: np.ndarray, wanted: Callable[[int, int], int], seed: int, draw: int) -> Int64[np.ndarray, " k"]:
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    chosen = []
    for label, members in zip(classes.tolist(), np.split(order, starts[1:]), strict=True):
        # A generator for each class: what is drawn from one does not depend on the others.
        generator = seeded_generator("cpu", seed, "images of a class", draw, label)
        shuffled = members[torch.randperm(len(members), generator=generator).numpy()]
        chosen.append(shuffled[: wanted(label, len(members))])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").split("\n")]
    except UnicodeDecodeError:
        lines = ["\0"]
    if any("\0" in line for line in lines):
        raise InputError(f"The list of images {path} is not UTF-8 text: give a text file with one name per line.")
    names = [line.removeprefix("./") for line in lines if line and not line.startswith("#")]
    if not names:
        raise InputError(f"The list of images {path} is empty: give a text file with one name per line.")
    return names


def _stem(name: str) -> str:
    """Return a name without its extension and without a synset at its end."""
    stem, dot, extension = name.rpartition(".")
    return _SYNSET.sub("", stem if dot and extension.lower() in IMAGE_EXTENSIONS else name)
