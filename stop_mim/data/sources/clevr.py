"""CLEVR in its own layout: images by split, and a file of scenes with the objects of each image and their distances."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import SOURCES, SourceKind, choose_split
from stop_mim.data.sources.folder import FileSource
from stop_mim.errors import InputError, first_line
from stop_mim.files import require_regular

# The test split has no scenes, so no labels.
_SPLITS = ("train", "val")


@SOURCES.register("clevr")
class Clevr(SourceKind):
    """A folder of CLEVR, labelled with the count of objects and the distance of the nearest; the test split is val."""

    help = "a folder of CLEVR"
    is_path = True

    @classmethod
    def matches(cls, name: str) -> bool:
        """Whether the folder has CLEVR's images by split, and beside them its scenes or at least its questions."""
        folder = Path(name).expanduser()
        beside = any((folder / other).is_dir() for other in ("scenes", "questions"))
        return bool(name) and beside and any((folder / "images" / split).is_dir() for split in (*_SPLITS, "test"))

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        folder = Path(name).expanduser()
        split = choose_split(split, [one for one in _SPLITS if (folder / "images" / one).is_dir()], name)
        images, scenes_path = folder / "images" / split, folder / "scenes" / f"CLEVR_{split}_scenes.json"
        scenes = _read_scenes(scenes_path)
        files = sorted(file for file in os.listdir(images) if file.endswith(".png") and not file.startswith("."))
        if different := sorted(scenes.keys() ^ set(files)):
            raise InputError(
                f"{len(different)} images have no file in {images} or no scene in {scenes_path}, {different[0]!r} first: "
                "unpack all images, and give the scenes of these images alone."
            )
        labels: dict[str, np.ndarray] = {
            "count": np.array([scenes[file][0] for file in files], dtype=np.int64),
            "distance": np.array([scenes[file][1] for file in files], dtype=np.float32),
        }
        return FileSource(images, files, name, labels, layout="clevr")


def _read_scenes(path: Path) -> dict[str, tuple[int, float]]:
    """Return the count and the nearest distance of the objects of each image, by the name of its file."""
    found: dict[str, tuple[int, float]] = {}
    require_regular(path)
    try:
        for scene in json.loads(path.read_bytes(), object_hook=_keep_needed)["scenes"]:
            file, distances = str(scene["image_filename"]), [float(one["pixel_coords"][2]) for one in scene["objects"]]
            if file in found or not all(map(math.isfinite, distances)):
                raise ValueError(f"{file} has a second scene, or a distance that is not finite")
            found[file] = len(distances), min(distances)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{path} cannot be read as scenes of CLEVR ({reason}): give the file of CLEVR_v1.0."
        ) from error
    if not found:
        raise InputError(f"{path} has no scenes: give the file of CLEVR_v1.0.")
    return found


def _keep_needed(fields: dict[str, Any]) -> Any:
    # Called for the innermost objects first, so that of hundreds of megabytes only a few numbers are ever held.
    if "pixel_coords" in fields:
        return {"pixel_coords": fields["pixel_coords"]}
    if "objects" in fields:
        return {key: fields.get(key) for key in ("image_filename", "objects")}
    return fields
