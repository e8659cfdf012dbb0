"""CLEVR in its own layout: images by split, and a file of scenes with the objects of each image and their distances."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.data.sources.folder import FileSource
from stop_mim.data.splits import choose_split
from stop_mim.errors import InputError

# The test split has no scenes, so no labels.
_SPLITS = ("train", "val")


@SOURCES.register("clevr")
class Clevr(SourceKind):
    """A folder of CLEVR, labelled with the count of objects and the distance of the nearest; the test split is val."""

    help = "a folder of CLEVR"

    @classmethod
    def matches(cls, name: str) -> bool:
        """Whether the folder has CLEVR's images by split, and beside them its scenes or at least its questions."""
        folder = Path(name).expanduser()
        beside = any((folder / other).is_dir() for other in ("scenes", "questions"))
        return bool(name) and beside and any((folder / "images" / split).is_dir() for split in (*_SPLITS, "test"))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        """Open a split with its scenes."""
        folder = Path(name).expanduser()
        split = choose_split(split, _splits(folder), name)
        images, scenes_path = folder / "images" / split, folder / "scenes" / f"CLEVR_{split}_scenes.json"
        scenes = _read_scenes(scenes_path)
        files = sorted(_png_names(images))
        _check_same(files, scenes, images, scenes_path)
        counts, distances = zip(*(scenes[file] for file in files), strict=True)
        labels: dict[str, np.ndarray] = {
            "count": np.array(counts, dtype=np.int64),
            "distance": np.array(distances, dtype=np.float32),
        }
        return FileSource(images, files, name, labels, layout="clevr")


def _splits(folder: Path) -> tuple[str, ...]:
    return tuple(split for split in _SPLITS if (folder / "images" / split).is_dir())


def _png_names(images: Path) -> list[str]:
    with os.scandir(images) as entries:
        return [entry.name for entry in entries if entry.name.endswith(".png") and not entry.name.startswith(".")]


def _read_scenes(path: Path) -> dict[str, tuple[int, float]]:
    if not path.is_file():
        raise InputError(f"The scenes of CLEVR, {path}, are not there: put that file of CLEVR_v1.0 in place.")
    try:
        content = json.loads(path.read_bytes(), object_hook=_keep_needed)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The scenes {path} cannot be read as JSON ({error}): give the whole file.") from error
    scenes = content.get("scenes") if isinstance(content, dict) else None
    if not isinstance(scenes, list) or not scenes:
        raise InputError(f"{path} has no list 'scenes' with at least one scene: give a file of scenes of CLEVR.")
    found: dict[str, tuple[int, float]] = {}
    for number, scene in enumerate(scenes):
        file, labels = _check_scene(scene, number, path)
        if file in found:
            raise InputError(f"{path} has more than one scene for the image {file}: keep one of them.")
        found[file] = labels
    return found


def _keep_needed(fields: dict[str, Any]) -> Any:
    # Called for the innermost objects first, so that of hundreds of megabytes only a few numbers are ever held.
    if "pixel_coords" in fields:
        return {"pixel_coords": fields["pixel_coords"]}
    if "objects" in fields:
        return {key: fields.get(key) for key in ("image_filename", "objects")}
    return fields


def _check_scene(scene: Any, number: int, path: Path) -> tuple[str, tuple[int, float]]:
    file = scene.get("image_filename") if isinstance(scene, dict) else None
    if not isinstance(file, str):
        raise InputError(f"Scene {number} of {path} has no 'image_filename': give a file of scenes of CLEVR.")
    objects = scene.get("objects")
    if not isinstance(objects, list) or not objects:
        raise InputError(f"The scene of {file} in {path} has no objects: remove that scene and its image.")
    distances = [_distance(thing) for thing in objects]
    known = [distance for distance in distances if distance is not None]
    if len(known) < len(objects):
        raise InputError(
            f"The scene of {file} in {path} has an object without three numbers 'pixel_coords': remove that scene and "
            "its image, or give the file of CLEVR_v1.0."
        )
    return file, (len(objects), min(known))


def _distance(thing: Any) -> float | None:
    coordinates = thing.get("pixel_coords") if isinstance(thing, dict) else None
    if not isinstance(coordinates, list) or len(coordinates) != 3:
        return None
    distance = coordinates[2]
    try:
        return float(distance) if isinstance(distance, int | float) and math.isfinite(distance) else None
    except OverflowError:
        return None


def _check_same(files: list[str], scenes: dict[str, tuple[int, float]], images: Path, scenes_path: Path) -> None:
    if missing := sorted(scenes.keys() - set(files)):
        raise InputError(
            f"{len(missing)} of the {len(scenes)} scenes in {scenes_path} have no image in {images}, {missing[0]!r} "
            "first: unpack all images, or remove these scenes."
        )
    if unknown := sorted(set(files) - scenes.keys()):
        raise InputError(
            f"{len(unknown)} of the {len(files)} images in {images} have no scene in {scenes_path}, {unknown[0]!r} "
            "first: give the scenes of all images, or remove these images."
        )
