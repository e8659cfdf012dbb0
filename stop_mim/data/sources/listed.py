"""Places205 and iNaturalist in the layouts of their publishers: image files with their classes in a list."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stop_mim.data.image_source import ImageSource, class_labels
from stop_mim.data.sources import SOURCES, SourceKind, choose_split
from stop_mim.data.sources.folder import FileSource
from stop_mim.errors import InputError, first_line

# Where the archives of Places205 put the lists and the images, and where people move them to.
_PLACES205_LISTS = ("trainvalsplit_places205", ".")
_PLACES205_IMAGES = ("data/vision/torralba/deeplearning/images256", "images256", ".")
_PLACES205_CLASSES = 205


@SOURCES.register("places205")
class Places205(SourceKind):
    """A folder with train_places205.csv or val_places205.csv, "a/abbey/x.jpg 0" a line; the test split is val."""

    help = "a folder of Places205"
    is_path = True

    @classmethod
    def matches(cls, name: str) -> bool:
        return bool(name) and bool(_places205_lists(Path(name).expanduser()))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        folder = Path(name).expanduser()
        lists = _places205_lists(folder)
        list_path = lists[choose_split(split, lists, name)]
        lines = list_path.read_text("utf-8-sig", "backslashreplace").splitlines()
        pairs = [_path_and_class(line.strip(), list_path) for line in lines if line.strip()]
        if not pairs:
            raise InputError(f"The list {list_path} is empty: give that of Places205, with a path and a class a line.")
        paths, classes = zip(*pairs, strict=True)
        names = {label: path.rpartition("/")[0] for path, label in pairs}
        class_names = tuple(names.get(label, str(label)) for label in range(_PLACES205_CLASSES))
        images = _places205_images(folder, paths[0], list_path)
        return FileSource(images, paths, name, class_labels(np.array(classes)), class_names, "places205")


@SOURCES.register("inaturalist")
class INaturalist(SourceKind):
    """A folder with train2018.json or val2018.json, whose category numbers are the classes; the test split is val."""

    help = "a folder of iNaturalist 2018"
    is_path = True

    @classmethod
    def matches(cls, name: str) -> bool:
        return bool(name) and bool(_annotations(Path(name).expanduser()))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        folder = Path(name).expanduser()
        annotations = _annotations(folder)
        path = annotations[choose_split(split, annotations, name)]
        pairs, class_names = _read_annotations(path)
        # The first folder of a file's name is the one that the archive unpacks to.
        paths = _checked_paths((file_name.partition("/")[2] for file_name, _ in pairs), path)
        images = folder / "train_val2018"
        if not (images / paths[0]).is_file():
            raise InputError(f"{images / paths[0]}, the first image of {path}, is not there: unpack the images there.")
        labels = class_labels(np.array([label for _, label in pairs]))
        return FileSource(images, paths, name, labels, class_names, "inat18")


def _annotations(folder: Path) -> dict[str, Path]:
    paths = {split: folder / f"{split}2018.json" for split in ("train", "val")}
    return {split: path for split, path in paths.items() if path.is_file()}


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


def _checked_paths(paths: Iterable[str], list_path: Path) -> list[str]:
    checked = [path.lstrip("/") for path in paths]
    for path in checked:
        # Lone surrogates, which JSON may hold, are no file names.
        valid = path and ".." not in path.split("/") and "\0" not in path and not re.search("[\ud800-\udfff]", path)
        if not valid:
            raise InputError(f"{list_path} names the image {path[:60]!r}: give paths within the folder of images.")
    return checked


def _read_annotations(path: Path) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    try:
        content = json.loads(path.read_bytes())
        categories = {int(category["id"]): str(category["name"]) for category in content["categories"]}
        class_of = {note["image_id"]: int(note["category_id"]) for note in content["annotations"]}
        pairs = [(str(image["file_name"]), class_of[image["id"]]) for image in content["images"]]
        if unknown := [label for _, label in pairs if label not in categories]:
            raise KeyError(f"category {unknown[0]}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{path} cannot be read as annotations of iNaturalist ({reason}): download it again."
        ) from error
    if not pairs:
        raise InputError(f"{path} lists no images: give the annotations of iNaturalist, with a category for each.")
    if sorted(categories) != list(range(len(categories))):
        raise InputError(f"The {len(categories)} categories of {path} are not numbered from 0: number them so.")
    return pairs, tuple(categories[label] for label in range(len(categories)))
