"""CLEVR, Places205 and iNaturalist 2018 in the layouts of their publishers: image files, with their labels in a list.

Their test splits have no labels, so the test split is val.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stop_mim.data.image_source import ImageSource, Labels, class_labels
from stop_mim.data.sources import choose_split, source
from stop_mim.data.sources.folder import FileSource
from stop_mim.errors import InputError, first_line
from stop_mim.files import require_regular, user_path

_SPLITS = ("train", "val")
# Where the archives of Places205 put the lists and the images, and where users move them to.
_PLACES205_LISTS = ("trainvalsplit_places205", ".")
_PLACES205_IMAGES = ("data/vision/torralba/deeplearning/images256", "images256", ".")
_PLACES205_CLASSES = 205


def _is_clevr(name: str) -> bool:
    """Whether the folder has CLEVR's images by split, and scenes or at least questions."""
    folder = user_path(name)
    described = any((folder / other).is_dir() for other in ("scenes", "questions"))
    return described and any((folder / "images" / split).is_dir() for split in (*_SPLITS, "test"))


@source("clevr", help="a folder of CLEVR", matches=_is_clevr, is_path=True)
def open_clevr(name: str, split: str) -> ImageSource:
    """Open a folder of CLEVR, labelled with the count of objects and the distance of the nearest."""
    folder = user_path(name)
    split = choose_split(split, [one for one in _SPLITS if (folder / "images" / one).is_dir()], name)
    images, scenes_path = folder / "images" / split, folder / "scenes" / f"CLEVR_{split}_scenes.json"
    scenes = _read_scenes(scenes_path)
    files = sorted(file for file in os.listdir(images) if file.endswith(".png") and not file.startswith("."))
    if different := sorted(scenes.keys() ^ set(files)):
        raise InputError(
            f"{len(different)} images have no file in {images} or no scene in {scenes_path}, {different[0]!r} first: "
            "unpack all images, and give the scenes of these images only."
        )
    labels: Labels = {
        "count": np.array([scenes[file][0] for file in files], dtype=np.int64),
        "distance": np.array([scenes[file][1] for file in files], dtype=np.float32),
    }
    return FileSource(images, files, name, labels, layout="clevr")


@source(
    "places205",
    help="a folder of Places205",
    matches=lambda name: bool(_places205_lists(name)),
    is_path=True,
)
def open_places205(name: str, split: str) -> ImageSource:
    """Open a folder with train_places205.csv or val_places205.csv, "a/abbey/x.jpg 0" a line."""
    lists = _places205_lists(name)
    list_path = lists[choose_split(split, lists, name)]
    lines = list_path.read_text("utf-8-sig", "backslashreplace").splitlines()
    pairs = [_path_and_class(line.strip(), list_path) for line in lines if line.strip()]
    if not pairs:
        raise InputError(f"The list {list_path} is empty: give that of Places205, with a path and a class a line.")
    paths, classes = zip(*pairs, strict=True)
    names = {label: path.rpartition("/")[0] for path, label in pairs}
    class_names = tuple(names.get(label, str(label)) for label in range(_PLACES205_CLASSES))
    images = _places205_images(user_path(name), paths[0], list_path)
    return FileSource(images, paths, name, class_labels(np.array(classes)), class_names, "places205")


@source(
    "inaturalist",
    help="a folder of iNaturalist 2018",
    matches=lambda name: bool(_lists(name, "{}2018.json")),
    is_path=True,
)
def open_inaturalist(name: str, split: str) -> ImageSource:
    """Open a folder with train2018.json or val2018.json, whose category numbers are the classes."""
    lists = _lists(name, "{}2018.json")
    path = lists[choose_split(split, lists, name)]
    pairs, class_names = _read_annotations(path)
    # The first folder of a file's name is the one that the archive unpacks to.
    paths = _checked_paths((file_name.partition("/")[2] for file_name, _ in pairs), path)
    images = user_path(name) / "train_val2018"
    if not (images / paths[0]).is_file():
        raise InputError(
            f"{images / paths[0]}, the first image of {path}, is missing: unpack the images into {images}."
        )
    labels = class_labels(np.array([label for _, label in pairs]))
    return FileSource(images, paths, name, labels, class_names, "inat18")


def _lists(folder: str, name: str) -> dict[str, Path]:
    """Return the lists of a folder that are there, by split."""
    paths = {split: user_path(folder) / name.format(split) for split in _SPLITS}
    return {split: path for split, path in paths.items() if path.is_file()}


def _places205_lists(folder: str) -> dict[str, Path]:
    found = (_lists(folder, f"{parent}/{{}}_places205.csv") for parent in _PLACES205_LISTS)
    return next(filter(None, found), {})


def _places205_images(folder: Path, first: str, list_path: Path) -> Path:
    for parent in _PLACES205_IMAGES:
        if (folder / parent / first).is_file():
            return folder / parent
    raise InputError(
        f"{folder / 'images256' / first}, the first image of {list_path}, is missing: put the images of the list there."
    )


def _path_and_class(line: str, list_path: Path) -> tuple[str, int]:
    # The published lists have a space between the two, despite the extension csv.
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
        # Lone surrogates, which JSON allows, cannot be in file names.
        valid = path and ".." not in path.split("/") and "\0" not in path and not re.search("[\ud800-\udfff]", path)
        if not valid:
            raise InputError(f"{list_path} names the image {path[:60]!r}: give paths within the folder of images.")
    return checked


@contextmanager
def _failures_as_input_error(path: Path, what: str, remedy: str) -> Iterator[None]:
    require_regular(path)
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{path} cannot be read as {what} ({reason}): {remedy}.") from error


def _read_annotations(path: Path) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Return the file and the class of each image, and the names of the classes."""
    with _failures_as_input_error(path, "annotations of iNaturalist", "download it again"):
        content = json.loads(path.read_bytes())
        categories = {int(category["id"]): str(category["name"]) for category in content["categories"]}
        class_of = {note["image_id"]: int(note["category_id"]) for note in content["annotations"]}
        pairs = [(str(image["file_name"]), class_of[image["id"]]) for image in content["images"]]
        if unknown := [label for _, label in pairs if label not in categories]:
            raise KeyError(f"category {unknown[0]}")
    if not pairs:
        raise InputError(f"{path} lists no images: give the annotations of iNaturalist, with a category for each.")
    if sorted(categories) != list(range(len(categories))):
        raise InputError(
            f"The {len(categories)} categories of {path} are not numbered from 0: number them from 0 without gaps."
        )
    return pairs, tuple(categories[label] for label in range(len(categories)))


def _read_scenes(path: Path) -> dict[str, tuple[int, float]]:
    """Return the count and the nearest distance of the objects of each image, by the name of its file."""
    found: dict[str, tuple[int, float]] = {}
    with _failures_as_input_error(path, "scenes of CLEVR", "give the file of CLEVR_v1.0"):
        for scene in json.loads(path.read_bytes(), object_hook=_keep_needed)["scenes"]:
            file, distances = str(scene["image_filename"]), [float(one["pixel_coords"][2]) for one in scene["objects"]]
            if file in found or not all(map(math.isfinite, distances)):
                raise ValueError(f"{file} has a second scene, or a distance that is not finite")
            found[file] = len(distances), min(distances)
    if not found:
        raise InputError(f"{path} has no scenes: give the file of CLEVR_v1.0.")
    return found


def _keep_needed(fields: dict[str, Any]) -> Any:
    # Called for the innermost objects first, so that hundreds of megabytes of JSON never are in memory as objects.
    if "pixel_coords" in fields:
        return {"pixel_coords": fields["pixel_coords"]}
    if "objects" in fields:
        return {key: fields.get(key) for key in ("image_filename", "objects")}
    return fields
