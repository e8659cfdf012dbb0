"""WebDataset shards: tar files of samples, indexed once and then read at any place; files at URLs are fetched as needed."""

import json
import os
import tarfile
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from stop_mim.data.cache import CacheError, cached_file, damage_named
from stop_mim.data.data_files import DataFile, FilesSource, find_files, read_file
from stop_mim.data.decode import IMAGE_EXTENSIONS
from stop_mim.data.image_source import ImageSource, class_labels, digest
from stop_mim.data.sources import source
from stop_mim.errors import InputError, MissingExtra, first_line

Sample = tuple[str, int, int, int]
"""The name of an image in a tar file, its offset, its size in bytes, and its class (-1 for none)."""


@source("wds", help="wds:PATTERN.tar (paths or URLs)", prefix="wds:", is_path=True)
def open_shards(pattern: str, split: str) -> ImageSource:
    """Open tar files that a pattern with braces, or a glob, names; they have no splits."""
    return ShardSource(pattern)


class ShardSource(FilesSource):
    """The samples with an image in uncompressed tar files, in the order in which they are stored."""

    def __init__(self, pattern: str) -> None:
        try:
            from braceexpand import braceexpand
        except ImportError as error:
            raise MissingExtra("wds: shards", "braceexpand", "wds") from error
        try:
            names = list(braceexpand(pattern))
        except ValueError as error:
            raise InputError(
                f"The pattern wds:{pattern} cannot be expanded ({first_line(error)}): write wds:shards-{{000..099}}.tar."
            ) from error
        files = find_files(names)
        self._fetched: dict[int, Path] = {}
        indexes = [_read_index(file) for file in files]
        # Arrays, not lists: reading a list's items in forked workers would copy its memory page by page.
        self._members = np.concatenate([members for members, _ in indexes])
        self._places = np.concatenate([places for _, places in indexes])
        if not len(self._members):
            raise InputError(f"The shards wds:{pattern} have no images: give tar files with jpg, png or webp members.")
        counts, labels = [len(members) for members, _ in indexes], class_labels(self._places[:, 2])
        super().__init__(f"wds:{pattern}", files, counts, labels)

    def encoded(self, index: int) -> bytes:
        shard, _ = self.locate(index)
        file = self.files[shard]
        before = None if file.is_remote else (file.size or 0, int(file.version))
        # The file is opened for each image: forked workers would share the position of an open file.
        offset, size, _ = self._places[index].tolist()
        return read_file(self.fetch(shard), self.describe(index), before, offset, size)

    def describe(self, index: int) -> str:
        return f"{self.files[self.locate(index)[0]]}#{self._member(index)}"

    def image_name(self, index: int) -> str:
        """The key of the sample: the member's path up to the first dot of its name."""
        folder, slash, base = self._member(index).rpartition("/")
        return folder + slash + base.partition(".")[0]

    def _member(self, index: int) -> str:
        return os.fsdecode(bytes(self._members[index]))

    def fetch(self, block: int) -> Path:
        """Return the file of a shard on this machine."""
        if block not in self._fetched or (self.blocks is not None and not self._fetched[block].exists()):
            self._fetched[block] = self.files[block].fetched(".tar")
        return self._fetched[block]


def _read_index(file: DataFile) -> tuple[Shaped[np.ndarray, " n"], Int[np.ndarray, "n 3"]]:
    """Return the names of a shard's images, and of each the offset, the size and the class.

    The index is cached until the file changes.
    """

    def write(draft: Path) -> None:
        draft.write_text(json.dumps(_build_index(file.fetched(".tar"), file.name)))

    place = file.name if file.is_remote else Path(file.name).resolve()
    try:
        path = cached_file(f"shards/{digest([2, place, *file.identity()])}.json", write)
        with damage_named(path):
            samples = json.loads(path.read_text())
    except CacheError:
        # Without a writable cache, the next run indexes again.
        samples = _build_index(file.fetched(".tar"), file.name)
    members = np.array([os.fsencode(member) for member, *_ in samples], dtype=bytes)
    return members, np.array([numbers for _, *numbers in samples], dtype=np.int64).reshape(-1, 3)


def _build_index(path: Path, shown: str) -> list[Sample]:
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    total = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if not 0 <= member.size <= total - member.offset_data:
                    raise tarfile.ReadError(f"{member.name} does not lie inside the file")
                if member.isfile() and stem:
                    samples.setdefault(f"{folder}/{stem}", {})[extension.lower()] = member
    # Damaged headers raise TarError, OSError, ValueError, OverflowError and others.
    except Exception as error:
        reason = first_line(error)
        raise InputError(f"{shown} cannot be read as a tar file ({reason}): give a whole, uncompressed one.") from error
    index: list[Sample] = []
    with open(path, "rb") as file:
        for sample in samples.values():
            image = next((sample[extension] for extension in sample if extension in IMAGE_EXTENSIONS), None)
            if image is not None:
                index.append((image.name, image.offset_data, image.size, _class(sample, file, shown)))
    return index


def _class(sample: dict[str, tarfile.TarInfo], file: BufferedIOBase, shown: str) -> int:
    member = sample.get("cls") or sample.get("json")
    if member is None:
        return -1
    file.seek(member.offset_data)
    text = file.read(member.size)
    try:
        fields = {"label": int(text)} if "cls" in sample else json.loads(text)
        label = fields.get("label") if isinstance(fields, dict) else None
        return int(np.int64(label)) if isinstance(label, int) else -1
    except (ValueError, RecursionError, OverflowError) as error:
        raise InputError(
            f"{shown}#{member.name} contains {text[:20]!r}: write an integer into a .cls and valid JSON into a .json."
        ) from error
