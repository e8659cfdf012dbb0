"""Images in a folder: the first level of sub-folders, where there is one, are the classes."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stop_mim.data.image_source import class_labels, digest
from stop_mim.data.images import IMAGE_EXTENSIONS, MAX_PIXELS, BadImage
from stop_mim.data.listed import ListedSource
from stop_mim.errors import InputError


class FolderSource(ListedSource):
    """The images under a folder, sorted by path; class_names fixes the classes, or they are the folder's own."""

    def __init__(
        self, folder: Path, name: str, class_names: tuple[str, ...] = (), max_pixels: int = MAX_PIXELS
    ) -> None:
        paths = sorted(_image_paths(folder))
        if not paths:
            extensions = ", ".join(sorted(IMAGE_EXTENSIONS))
            raise InputError(f"The folder {folder} holds no images: give one with files of the types {extensions}.")
        classes, class_names = _classes(paths, folder, class_names)
        super().__init__(folder, paths, name, class_labels(classes), class_names, max_pixels)
        self._root = str(folder)

    # Both as in a list, but without paths as objects, which cost as much as reading a small file.
    def describe(self, index: int) -> str:
        """The path of the file."""
        return os.path.join(self._root, self._relative_path(index))

    def encoded(self, index: int) -> bytes:
        """The bytes of the file; raises BadImage."""
        path = self.describe(index)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise BadImage(path, error.strerror or str(error)) from error

    def fingerprint(self) -> str:
        """Depends on the paths within the folder, which tell the labels, and the sizes and times of the files."""
        return digest(self.file_states())


def sub_folders(folder: Path) -> tuple[str, ...]:
    """The names of the visible sub-folders, sorted."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _image_paths(folder: Path, prefix: str = "", ancestors: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    state = os.stat(folder)
    identity = (state.st_dev, state.st_ino)
    # A link back to a folder that we are in would never end; a link to one beside it is followed.
    if identity in ancestors:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _image_paths(folder / entry.name, prefix + entry.name + os.sep, ancestors | {identity})
            elif entry.name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS and entry.is_file():
                yield prefix + entry.name


def _classes(paths: list[str], folder: Path, class_names: tuple[str, ...]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    at_top = [path for path in paths if os.sep not in path]
    if len(at_top) == len(paths):
        return None, ()
    if at_top:
        raise InputError(
            f"The folder {folder} has images both at its top ({at_top[0]}) and in sub-folders: move them all into "
            "sub-folders (one a class) or all to the top (no classes)."
        )
    found = [path.partition(os.sep)[0] for path in paths]
    names = class_names or tuple(sorted(set(found)))
    positions = {name: position for position, name in enumerate(names)}
    if unknown := sorted(set(found) - set(names)):
        raise InputError(
            f"The folder {folder / unknown[0]} is no class of the training split: its name must be that of one of "
            f"the {len(names)} sub-folders there."
        )
    return np.array([positions[name] for name in found], dtype=np.int64), names
