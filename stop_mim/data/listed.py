"""Image files that a list names, with their classes: Places205 and iNaturalist in the layouts of their publishers."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from stop_mim.data.image_source import EncodedSource, class_labels, digest
from stop_mim.data.images import MAX_PIXELS, BadImage, image_size
from stop_mim.data.splits import choose_split
from stop_mim.errors import InputError

INATURALIST_YEARS = ("2018", "2017", "2019")
"""The years whose archives hold training and validation images together, which only the annotations tell apart."""

# Where the archives of Places205 put the lists and the images, and where people move them to.
_PLACES205_LISTS = ("trainvalsplit_places205", ".")
_PLACES205_IMAGES = ("data/vision/torralba/deeplearning/images256", "images256", ".")
_PLACES205_CLASSES = 205

_INATURALIST_IMAGES = {"2017": "train_val_images"}


class ListedSource(EncodedSource):
    """Files by their paths within a folder, in the given order; a file that is missing is a bad image when read."""

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str],
        name: str,
        labels: dict[str, np.ndarray] | None = None,
        class_names: tuple[str, ...] = (),
        max_pixels: int = MAX_PIXELS,
        layout: str = "",
    ) -> None:
        super().__init__(name, labels, class_names)
        self.folder = folder
        self.max_pixels = max_pixels
        self.layout = layout
        # One array, not a list: reading a list's strings in forked workers would copy its memory page by page.
        self._paths = np.array([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        """The bytes of the file; raises BadImage."""
        try:
            return Path(self.describe(index)).read_bytes()
        except OSError as error:
            raise BadImage(self.describe(index), error.strerror or str(error)) from error

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image, reading no more of the file than its header; raises BadImage."""
        self.check_index(index)
        try:
            with open(self.describe(index), "rb") as file:
                return image_size(file, self.describe(index))
        except OSError as error:
            raise BadImage(self.describe(index), error.strerror or str(error)) from error

    def describe(self, index: int) -> str:
        """The path of the file."""
        return str(self.folder / self._relative_path(index))

    def image_name(self, index: int) -> str:
        """The path within the folder."""
        return self._relative_path(index).replace(os.sep, "/")

    def fingerprint(self) -> str:
        """Depends on the paths within the folder, the sizes and times of the files, and the labels."""
        labels = (part for key in sorted(self.labels) for part in (key, self.labels[key].tobytes()))
        return digest([*self.file_states(), *labels])

    def file_states(self) -> Iterator[object]:
        """The path within the folder, the size and the time of change of each file; -1 for a missing one."""
        for index in range(len(self)):
            try:
                state = os.stat(self.describe(index))
                yield from (self.image_name(index), state.st_size, state.st_mtime_ns)
            except FileNotFoundError:
                yield from (self.image_name(index), -1, -1)

    def _relative_path(self, index: int) -> str:
        return os.fsdecode(bytes(self._paths[index]))


def has_places205_lists(folder: Path) -> bool:
    """Whether the folder holds train_places205.csv or val_places205.csv, at its top or as their archive has them."""
    return bool(_places205_lists(folder))


def open_places205(folder: Path, name: str, split: str, max_pixels: int = MAX_PIXELS) -> ListedSource:
    """Places205 by its own lists, "a/abbey/x.jpg 0" a line; the test split is val, since test has no labels."""
    lists = _places205_lists(folder)
    list_path = lists[choose_split(split, lists, name)]
    pairs = [_path_and_class(line, list_path) for line in _text_lines(list_path)]
    if not pairs:
        raise InputError(f"The list {list_path} is empty: give the one of Places205, with a path and a class a line.")
    paths, classes = zip(*pairs, strict=True)
    images = _places205_images(folder, paths[0], list_path)
    names = {label: path.rpartition("/")[0] for path, label in pairs}
    class_names = tuple(names.get(label, str(label)) for label in range(_PLACES205_CLASSES))
    labels = class_labels(np.array(classes))
    return ListedSource(images, paths, name, labels, class_names, max_pixels, "places205")


def inaturalist_annotations(folder: Path, year: str) -> dict[str, Path]:
    """The files of annotations of that year in the folder, by split."""
    paths = {split: folder / f"{split}{year}.json" for split in ("train", "val")}
    return {split: path for split, path in paths.items() if path.is_file()}


def inaturalist_year(folder: Path) -> str | None:
    """The year whose annotations, such as train2018.json, lie in the folder."""
    return next((year for year in INATURALIST_YEARS if inaturalist_annotations(folder, year)), None)


def open_inaturalist(
    folder: Path, name: str, split: str, year: str, max_pixels: int = MAX_PIXELS, images: Path | None = None
) -> ListedSource:
    """iNaturalist by its own annotations, whose category numbers are the classes; the test split is val.

    The images are in the folder that the archive unpacks to (train_val2018), or in the one that is given.
    """
    annotations = inaturalist_annotations(folder, year)
    if not annotations:
        raise InputError(
            f"{name} has neither train{year}.json nor val{year}.json in {folder}: put the annotations of iNaturalist "
            f"{year} there, since the archive of its images does not tell training and validation images apart."
        )
    path = annotations[choose_split(split, annotations, name)]
    pairs, class_names = _read_annotations(path)
    # The first folder of a file's name is the one that the archive unpacks to.
    paths = _checked_paths((file_name.partition("/")[2] for file_name, _ in pairs), path)
    images = images or folder / _INATURALIST_IMAGES.get(year, f"train_val{year}")
    if not (images / paths[0]).is_file():
        raise InputError(f"{images / paths[0]}, the first image of {path}, is not there: unpack the images there.")
    labels = class_labels(np.array([label for _, label in pairs]))
    return ListedSource(images, paths, name, labels, class_names, max_pixels, f"inat{year[2:]}")


def _places205_lists(folder: Path) -> dict[str, Path]:
    for parent in _PLACES205_LISTS:
        lists = {split: folder / parent / f"{split}_places205.csv" for split in ("train", "val")}
        if found := {split: path for split, path in lists.items() if path.is_file()}:
            return found
    return {}


def _places205_images(folder: Path, first: str, list_path: Path) -> Path:
    for parent in _PLACES205_IMAGES:
        if (folder / parent / first).is_file():
            return folder / parent
    raise InputError(f"{folder / 'images256' / first}, the first image of {list_path}, is not there: put them there.")


def _path_and_class(line: str, list_path: Path) -> tuple[str, int]:
    # Published with a blank between the two, in spite of the ending csv.
    match = re.fullmatch(r"(.+?)\s*[,\s]\s*(\d{1,9})", line, re.ASCII)
    if match is None or int(match[2]) >= _PLACES205_CLASSES:
        raise InputError(
            f"The list {list_path} has the line {line[:60]!r}: give a path and a class from 0 to "
            f"{_PLACES205_CLASSES - 1} on each."
        )
    return _checked_paths([match[1]], list_path)[0], int(match[2])


def _text_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The list {path} cannot be read ({error}): give a text file in UTF-8.") from error
    return [line.strip() for line in lines if line.strip()]


def _checked_paths(paths: Iterable[str], list_path: Path) -> list[str]:
    checked = [path.lstrip("/") for path in paths]
    for path in checked:
        if not path or ".." in path.split("/") or not _is_file_name(path):
            raise InputError(f"{list_path} names the image {path[:60]!r}: give paths within the folder of images.")
    return checked


def _is_file_name(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _read_annotations(path: Path) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    try:
        content = json.loads(path.read_bytes())
        categories = {int(category["id"]): str(category["name"]) for category in content["categories"]}
        class_of = {note["image_id"]: int(note["category_id"]) for note in content["annotations"]}
        pairs = [(str(image["file_name"]), class_of[image["id"]]) for image in content["images"]]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            f"{path} cannot be read as annotations of iNaturalist ({reason}): download it again."
        ) from error
    if not pairs:
        raise InputError(f"{path} lists no images: give the annotations of iNaturalist, with a category for each.")
    if unknown := [label for _, label in pairs if label not in categories]:
        raise InputError(
            f"{path} has images of the category {unknown[0]!r}, which it does not list: download it again."
        )
    if sorted(categories) != list(range(len(categories))):
        raise InputError(f"The {len(categories)} categories of {path} are not numbered from 0: number them so.")
    return pairs, tuple(categories[label] for label in range(len(categories)))
