"""Images in a folder, at any depth: the sub-folders of the first level are the classes or the splits.

If there are images both at the top and in sub-folders, they have no labels.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from stop_mim.data.data_files import file_state, read_file
from stop_mim.data.decode import IMAGE_EXTENSIONS, BadImage
from stop_mim.data.image_source import UNREAD_PHOTOS, ImageSource, Labels, class_labels, digest
from stop_mim.data.sources import SPLIT_NAMES, are_splits, choose_split, source
from stop_mim.data.sources.parquet import ParquetSource, parquet_files
from stop_mim.errors import InputError
from stop_mim.files import user_path

WHOLE_BYTES, FILES_LOOKED_AT = 2**28, 256
"""Without times, a fingerprint depends on all bytes up to a total of 256 MiB, otherwise on the bytes of 256 files."""


@source(
    "folder",
    help="a folder of images",
    matches=lambda name: user_path(name).is_dir(),
    is_path=True,
    is_general=True,
)
def open_folder(name: str, split: str) -> ImageSource:
    """Open images, class folders, splits of them, or parquet files."""
    folder = user_path(name)
    class_names: tuple[str, ...] = ()
    names = sub_folders(folder)
    outside: dict[str, int] = {}
    if are_splits(names):
        # The test split may lack a class of the training split, but has to number classes in the same way.
        class_names = sub_folders(folder / "train")
        splits = [one for one in names if one in SPLIT_NAMES or one == split]
        if others := _image_paths(folder, splits)[0]:
            where = " and ".join(f"{one}/" for one in splits)
            outside[f"images beside {where} (move them there to use them)"] = len(others)
        folder = folder / choose_split(split, names, name)
    if files := parquet_files(folder, split):
        return ParquetSource(files, name)
    found, ignored = _image_paths(folder)
    if not found:
        if photos := {kind: count for kind, count in ignored.items() if kind in UNREAD_PHOTOS}:
            found_instead = ", ".join(f"{count:,} {kind}" for kind, count in photos.items())
            raise InputError(f"The folder {folder} has no images, but {found_instead}: convert them to JPEG.")
        extensions = ", ".join(sorted(IMAGE_EXTENSIONS))
        raise InputError(f"The folder {folder} has no images: give one with files of the types {extensions}.")
    paths = sorted(found)
    at_top = next((path for path in paths if os.sep not in path), None)
    classes, class_names = (None, ()) if at_top else _classes(paths, folder, class_names)
    opened = FileSource(folder, paths, name, class_labels(classes), class_names)
    opened.ignored = outside | ignored
    if at_top and any(os.sep in path for path in paths):
        opened.no_labels = f"it has images both at its top ({at_top}) and in sub-folders"
    return opened


class FileSource(ImageSource):
    """Files by their paths within a folder, in the given order; a missing file is a bad image when it is read."""

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str],
        name: str,
        labels: Labels | None = None,
        class_names: tuple[str, ...] = (),
        layout: str = "",
    ) -> None:
        super().__init__(name, labels, class_names)
        self.layout, self._root = layout, str(folder)
        # Arrays, not lists: reading a list's items in forked workers would copy its memory page by page.
        self._paths = np.array([os.fsencode(path) for path in paths])
        self._states = np.array([file_state(os.path.join(self._root, path)) for path in paths], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    # Without pathlib, which costs as much as reading a small file.
    def describe(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(bytes(self._paths[index])))

    def encoded(self, index: int) -> bytes:
        path = self.describe(index)
        return read_file(path, path, self._state(index))

    def image_name(self, index: int) -> str:
        return os.fsdecode(bytes(self._paths[index])).replace(os.sep, "/")

    def fingerprint(self, times: bool = True) -> str:
        """Names, sizes and labels of all files, with their times or with the bytes of all or some."""
        return digest(self._identity(times))

    def _identity(self, times: bool) -> Iterator[object]:
        total = int(self._states[:, 0].clip(0).sum())
        for index in range(len(self)):
            state = self._state(index)
            yield from (self.image_name(index), *(state if times else state[:1]))
        for key in sorted(self.labels):
            yield from (key, self.labels[key].tobytes())
        if not times:
            for index in range(0, len(self), 1 if total <= WHOLE_BYTES else max(1, len(self) // FILES_LOOKED_AT)):
                with suppress(BadImage):
                    yield self.encoded(index)

    def _state(self, index: int) -> tuple[int, int]:
        size, time = self._states[index].tolist()
        return size, time


def sub_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the visible sub-folders, sorted."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _image_paths(folder: Path, left_out: Sequence[str] = ()) -> tuple[list[str], dict[str, int]]:
    """Return the images' paths within the folder, and how many other files there are, by extension.

    Links to folders are followed, but not back to a folder that contains them. Hidden files are not counted, nor what is in
    the sub-folders `left_out`.
    """
    found: list[str] = []
    ignored: Counter[str] = Counter()
    visible: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while visible:
        prefix, ancestors = visible.pop()
        state = os.stat(folder / prefix)
        identity = (state.st_dev, state.st_ino)
        if identity in ancestors:
            continue
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.name.startswith(".") or (not prefix and entry.name in left_out):
                    continue
                if _holds(entry.is_dir):
                    visible.append((prefix + entry.name + os.sep, ancestors | {identity}))
                elif _holds(entry.is_file):
                    extension = os.path.splitext(entry.name)[1].lower()
                    if extension[1:] in IMAGE_EXTENSIONS:
                        found.append(prefix + entry.name)
                    else:
                        ignored[extension] += 1
    return found, dict(ignored)


def _holds(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:
        return False  # A link to itself is neither a folder nor a file.


def _classes(paths: list[str], folder: Path, class_names: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each path, by its first folder, and the names of the classes."""
    found = [path.partition(os.sep)[0] for path in paths]
    names = class_names or tuple(sorted(set(found)))
    positions = {name: position for position, name in enumerate(names)}
    if unknown := sorted(set(found) - set(names)):
        raise InputError(
            f"The folder {folder / unknown[0]} is not a class of the training split: rename it to one of the "
            f"{len(names)} classes there."
        )
    return np.array([positions[name] for name in found], dtype=np.int64), names
