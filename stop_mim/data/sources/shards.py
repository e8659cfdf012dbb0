"""WebDataset shards: tar files of samples, indexed once and then read at any place; those at URLs are fetched as needed."""

import glob
import json
import os
import tarfile
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from stop_mim.data.cache import CacheError, cached_file
from stop_mim.data.decode import IMAGE_EXTENSIONS
from stop_mim.data.image_source import (
    SAMPLES,
    SAMPLES_A_FILE,
    ImageSource,
    class_labels,
    digest,
    file_identity,
    file_state,
    locate,
    read_file,
)
from stop_mim.data.remote import RemoteFile, find_files, is_url
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.errors import InputError, MissingExtra, first_line

Sample = tuple[str, int, int, int]
"""The name of an image in a tar file, its offset, its size in bytes, and its class (-1 for none)."""


@SOURCES.register("wds")
class ShardKind(SourceKind):
    """Tar files that a pattern with braces, or a glob, names; they have no splits."""

    help, prefix = "wds:PATTERN.tar (paths or URLs)", "wds:"
    is_path = True

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        return ShardSource(name.removeprefix(cls.prefix))


class ShardSource(ImageSource):
    """The samples with an image in uncompressed tar files, in the order in which they are stored."""

    def __init__(self, pattern: str) -> None:
        self.paths = shard_paths(pattern)
        self._states = [file_state(path) if isinstance(path, Path) else None for path in self.paths]
        self._fetched: dict[int, Path] = {}
        indexes = [self._index(number) for number in range(len(self.paths))]
        self._ends = np.cumsum([len(index.offsets) for index in indexes])
        if not self._ends[-1]:
            raise InputError(f"The shards wds:{pattern} hold no images: give tar files with jpg, png or webp members.")
        super().__init__(f"wds:{pattern}", class_labels(np.concatenate([index.classes for index in indexes])))
        # Arrays, not lists: reading a list's items in forked workers would copy its memory page by page.
        self._members = np.concatenate([index.members for index in indexes])
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._sizes = np.concatenate([index.sizes for index in indexes])
        self.blocks = self._ends if any(isinstance(path, RemoteFile) for path in self.paths) else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: Int[np.ndarray, " n"]) -> None:
        for shard in np.unique(np.searchsorted(self._ends, indices, side="right")).tolist():
            self._local(shard)

    def encoded(self, index: int) -> bytes:
        shard = locate(self._ends, index)[0]
        # A file opened for each image has no position that forked workers could move under each other.
        where = int(self._offsets[index]), int(self._sizes[index])
        return read_file(self._local(shard), self.describe(index), self._states[shard], *where)

    def describe(self, index: int) -> str:
        return f"{self._shard(index)}#{self._member(index)}"

    def image_name(self, index: int) -> str:
        """The key of the sample: the member's path up to the first dot of its name."""
        folder, slash, base = self._member(index).rpartition("/")
        return folder + slash + base.partition(".")[0]

    def fingerprint(self) -> str:
        return digest(part for path in self.paths for part in _identity(path))

    def contents(self) -> str:
        samples = max(1, min(SAMPLES_A_FILE, SAMPLES // len(self.paths)))
        return digest(
            part
            for path in self.paths
            for part in (path.identity() if isinstance(path, RemoteFile) else file_identity(path, samples, times=False))
        )

    def _member(self, index: int) -> str:
        return os.fsdecode(bytes(self._members[index]))

    def _shard(self, index: int) -> Path | RemoteFile:
        return self.paths[locate(self._ends, index)[0]]

    def _local(self, shard: int) -> Path:
        """Return the file of a shard on this machine."""
        path = self.paths[shard]
        if isinstance(path, Path):
            return path
        if shard not in self._fetched or not self._fetched[shard].exists():
            self._fetched[shard] = path.fetched(".tar")
        return self._fetched[shard]

    def _index(self, shard: int) -> "ShardIndex":
        """Return the samples of a shard, from the cache folder if the file has not changed since."""
        path = self.paths[shard]
        place = path.url if isinstance(path, RemoteFile) else path.resolve()

        def write(draft: Path) -> None:
            draft.write_text(json.dumps(_build_index(self._local(shard), str(path))))

        try:
            cached = cached_file(f"shards/{digest([2, place, *_identity(path)])}.json", write)
            return ShardIndex.of(json.loads(cached.path.read_text()))
        except CacheError:
            # The cache only saves time: where it cannot be written, the next run indexes again.
            return ShardIndex.of(_build_index(self._local(shard), str(path)))


class ShardIndex(NamedTuple):
    """The samples of a shard."""

    members: Shaped[np.ndarray, " n"]
    offsets: Int[np.ndarray, " n"]
    sizes: Int[np.ndarray, " n"]
    classes: Int[np.ndarray, " n"]

    @classmethod
    def of(cls, samples: Sequence[Sequence[Any]]) -> "ShardIndex":
        """Return the index of these samples."""
        members, offsets, sizes, classes = zip(*samples, strict=True) if samples else ((), (), (), ())
        numbers = (np.array(values, dtype=np.int64) for values in (offsets, sizes, classes))
        return cls(np.array([os.fsencode(member) for member in members], dtype=bytes), *numbers)


def shard_paths(pattern: str) -> Sequence[Path | RemoteFile]:
    """Return the tar files that a pattern with braces, or a glob, names: paths or URLs."""
    try:
        from braceexpand import braceexpand
    except ImportError as error:
        raise MissingExtra("wds: shards", "braceexpand", "wds") from error
    names = list(braceexpand(pattern))
    if is_url(names[0]):
        return find_files(names)
    paths: list[Path] = []
    for expanded in map(os.path.expanduser, names):
        paths += [Path(path) for path in sorted(glob.glob(expanded))] or [Path(expanded)]
    if missing := [path for path in paths if not path.is_file()]:
        raise InputError(
            f"{len(missing)} of the {len(paths)} shards of wds:{pattern} are not there, {missing[0]} first: give a "
            "pattern of tar files, such as wds:shards-{000..099}.tar."
        )
    return paths


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
        if "cls" in sample:
            return int(text)
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{shown}#{member.name} holds {text[:20]!r}: a .cls is an integer, a .json is JSON."
        ) from error
    label = fields.get("label") if isinstance(fields, dict) else None
    return label if isinstance(label, int) else -1


def _identity(path: Path | RemoteFile) -> tuple[object, ...]:
    if isinstance(path, RemoteFile):
        return path.identity()
    state = path.stat()
    return path.name, state.st_size, state.st_mtime_ns
