"""Labelled sets of images: some images of a source with their classes, and parts held out of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from stop_mim.data.image_source import ImageSource, digest
from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator


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
        """The images at these places of the set, as a set of their own."""
        return replace(self, indices=self.indices[positions])

    def fingerprint(self) -> str:
        """A short hexadecimal name: it changes with the images, their labels or the choice of them."""
        return digest([self.source.fingerprint(), self.indices.astype(np.int64).tobytes(), self.classes.tobytes()])


def hold_out(data: LabelledSet, part: float, most: int, seed: int) -> tuple[LabelledSet, LabelledSet]:
    """Split off a part, of every class alike; an image of each class always remains. Returns the rest and the part."""
    classes = data.classes
    shuffled = torch.randperm(len(data), generator=seeded_generator("cpu", seed, "held out")).numpy()
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    first_of_class = np.diff(classes[by_class], prepend=-1) != 0
    may_go = by_class[~first_of_class]
    count = min(most, max(1, round(part * len(data))), len(may_go))
    if not count:
        raise InputError(f"'{data.source.name}' has one image a class: with more of them, some can be held out.")
    # Evenly spaced in the order of classes, so that each class gives in proportion to its images.
    held = may_go[((np.arange(count) + 0.5) * len(may_go) / count).astype(int)]
    remains = np.setdiff1d(np.arange(len(data)), held)
    return data.part(remains), data.part(np.sort(held))
