"""One name opens one data set: scenes, folders, parquet files, torchvision, the Hugging Face hub, tar shards.

A folder may hold images, class folders or splits, parquet files, or CLEVR, Places205 or iNaturalist as published.
"""

import glob
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data import scenes
from stop_mim.data.clevr import ClevrSource, has_clevr_layout
from stop_mim.data.folders import FolderSource, sub_folders
from stop_mim.data.hub import HubSource
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.images import MAX_PIXELS
from stop_mim.data.listed import has_places205_lists, inaturalist_year, open_inaturalist, open_places205
from stop_mim.data.parquets import ParquetSource, parquet_files
from stop_mim.data.shards import ShardSource
from stop_mim.data.splits import are_splits, choose_split
from stop_mim.data.torchvision_sets import open_torchvision
from stop_mim.errors import InputError

__all__ = ["ImageSource", "SceneSource", "open_source"]

_SCENE_DEFAULTS = {"count": 10_000, "size": 64, "seed": 0}

# Added to the seed for every split but the training split: seeds that a user gives are smaller.
_TEST_SEED_OFFSET = 2**31

_KINDS = (
    "scenes, a folder of images, a parquet file (or a glob or folder of them), torchvision:NAME, hf:OWNER/NAME or "
    "wds:PATTERN.tar"
)


class SceneSource(ImageSource):
    """Drawn scenes, all in memory, labelled with the count of objects and the distance of the nearest."""

    def __init__(self, options: str = "", split: str = "train") -> None:
        chosen = _scene_options(options)
        if split != "train":
            chosen |= {"count": max(1, chosen["count"] // 5), "seed": chosen["seed"] + _TEST_SEED_OFFSET}
        self.scenes = scenes.load_scenes(chosen["count"], chosen["size"], chosen["seed"])
        labels = {"count": self.scenes.counts.numpy(), "distance": self.scenes.nearest_distances.numpy()}
        super().__init__("scenes:" + ",".join(f"{key}={value}" for key, value in chosen.items()), labels)

    def __len__(self) -> int:
        return len(self.scenes.images)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The image as RGB."""
        if index < 0:
            raise IndexError(f"{self.name} has no image {index}")
        return self.scenes.images[index]

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of the image."""
        return self.scenes.images.shape[2], self.scenes.images.shape[3]

    def describe(self, index: int) -> str:
        """The options and the position."""
        return f"{self.name}#{index}"

    def image_name(self, index: int) -> str:
        """The position; scenes have no files."""
        return f"scene-{index}"

    def fingerprint(self) -> str:
        """Depends on the options and, lest the way of drawing change, on the first image."""
        return digest([self.name, self.scenes.images[0].numpy().tobytes()])

    def stacked(self) -> UInt8[Tensor, "n 3 height width"]:
        """All the images."""
        return self.scenes.images


def open_source(name: str, split: str = "train", max_pixels: int = MAX_PIXELS) -> ImageSource:
    """The data set of this name; a name without splits of its own is the same data for each split."""
    kind, _, rest = name.partition(":")
    if kind == "scenes":
        return SceneSource(rest, split)
    if kind == "torchvision" and rest:
        return open_torchvision(rest, split, max_pixels)
    if kind == "hf" and rest:
        return HubSource(rest, split, max_pixels)
    if kind == "wds" and rest:
        return ShardSource(rest, max_pixels)
    path = Path(name).expanduser()
    # The empty name would be the current folder.
    if name and path.is_dir():
        return _open_folder(path, name, split, max_pixels)
    paths = [path] if path.is_file() else [Path(found) for found in sorted(glob.glob(str(path)))]
    if not paths:
        raise InputError(f"There is no data set '{name}': give {_KINDS}.")
    if other := [path for path in paths if path.suffix.lower() != ".parquet"]:
        raise InputError(f"{other[0]} is no data set: give {_KINDS}.")
    return ParquetSource(paths, name, max_pixels)


def _open_folder(folder: Path, name: str, split: str, max_pixels: int) -> ImageSource:
    if has_clevr_layout(folder):
        return ClevrSource(folder, name, split, max_pixels)
    if has_places205_lists(folder):
        return open_places205(folder, name, split, max_pixels)
    if year := inaturalist_year(folder):
        return open_inaturalist(folder, name, split, year, max_pixels)
    class_names: tuple[str, ...] = ()
    names = sub_folders(folder)
    if are_splits(names):
        # The test split may lack a class of the training split, and must number the others as that does.
        class_names = sub_folders(folder / "train")
        folder = folder / choose_split(split, names, name)
    if files := parquet_files(folder, split):
        return ParquetSource(files, name, max_pixels)
    return FolderSource(folder, name, class_names, max_pixels)


def _scene_options(options: str) -> dict[str, int]:
    chosen = dict(_SCENE_DEFAULTS)
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in chosen:
            raise InputError(f"scenes has no option '{key}': choose among {', '.join(chosen)}.")
        if not value.isdecimal() or (key != "seed" and int(value) < 1):
            raise InputError(
                f"The option {key} of scenes is '{value}': give a whole number, as in {key}={chosen[key]}."
            )
        chosen[key] = int(value)
    return chosen
