"""Files that hold many images each, at paths or at URLs (http, s3, gs and others that fsspec knows).

When an image of a file at a URL is needed, the whole file is downloaded into the cache. Beyond a limit of size, the least
recently used files are removed.
"""

import errno
import glob
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stop_mim.data.cache import cached_file, gib_from
from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource, Labels, digest
from stop_mim.data.order import BLOCKS_AHEAD, BLOCKS_TOGETHER
from stop_mim.errors import InputError, MissingExtra, first_line
from stop_mim.files import require_regular

REMOTE_GIB = 50.0
"""The most GiB of downloaded files in the cache, unless STOP_MIM_REMOTE_GIB is set."""
BLOCKS_KEPT = 2 * BLOCKS_TOGETHER + BLOCKS_AHEAD
"""This many files are always kept: those in use, those fetched ahead, and some more."""
ATTEMPTS = 4
# Names of a file's version in different stores; the first one found is used.
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
# A fingerprint reads bytes at this many places: of a file, and of all files together.
SAMPLES_A_FILE, SAMPLES, BYTES_A_SAMPLE = 64, 4096, 4096

Result = TypeVar("Result")


def is_url(name: str) -> bool:
    """Return whether a name is a URL, such as s3://bucket/file."""
    return "://" in name


@dataclass(frozen=True)
class DataFile:
    """A file at a path or a URL, with the size and the modification time (or version) that it had when it was opened."""

    name: str
    size: int | None
    version: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_remote(self) -> bool:
        """Whether the file is at a URL."""
        return is_url(self.name)

    def identity(self, samples: int = 0, times: bool = True) -> Iterator[object]:
        """Yield name, size, version (of a local file: if `times`) and the bytes at `samples` places of a local file."""
        yield from (os.path.basename(self.name), self.size)
        if times or self.is_remote:
            yield self.version
        if samples and not self.is_remote:
            with open(self.name, "rb") as file:
                last = max(0, (self.size or 0) - BYTES_A_SAMPLE)
                for start in np.linspace(0, last, samples, dtype=np.int64).tolist():
                    file.seek(start)
                    yield file.read(BYTES_A_SAMPLE)

    def open(self) -> Any:
        """Open the file; from a URL, only the ranges that are read are transferred."""
        if not self.is_remote:
            return open(self.name, "rb")
        system, path = _file_system(self.name)
        return system.open(path, "rb")

    def require_unchanged(self) -> None:
        """Raise InputError if the file is not what it was when the data were opened."""
        if self.is_remote:
            _file_system(self.name)[0].invalidate_cache()
        if found_file(self.name) != self:
            raise changed(self)

    def converted(self, ending: str, write: Callable[[Path], None]) -> Path:
        """Return the cached file that `write(path)` makes from this one."""

        def convert(draft: Path) -> None:
            attempted(self.name, partial(write, draft))
            self.require_unchanged()

        folder, key = "remote" if self.is_remote else "arrow", digest([self.name, *self.identity(SAMPLES_A_FILE)])
        path = cached_file(f"{folder}/{key}{ending}", convert)
        if self.is_remote:
            with suppress(FileNotFoundError):
                os.utime(path)
            _forget_oldest(path.parent)
        return path

    def fetched(self, ending: str) -> Path:
        """Return a local path; a file at a URL is downloaded first."""

        def fetch(draft: Path) -> None:
            system, path = _file_system(self.name)
            system.get_file(path, str(draft))

        return self.converted(ending, fetch) if self.is_remote else Path(self.name)


class FilesSource(ImageSource):
    """The images of several files, one file after the other; a file at a URL is a block, which is downloaded as a whole."""

    def __init__(
        self,
        name: str,
        files: Sequence[DataFile],
        counts: Sequence[int],
        labels: Labels,
        class_names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, labels, class_names)
        self.files, self._ends = files, np.cumsum(counts)
        self.blocks = self._ends if files[0].is_remote else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file that contains an image, and the image's place in it."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    def fingerprint(self, times: bool = True) -> str:
        samples = max(1, min(SAMPLES_A_FILE, SAMPLES // len(self.files)))
        return digest(part for file in self.files for part in file.identity(samples, times))


def matching_paths(pattern: str) -> list[str]:
    """Return the file of this path, or the files that match a glob."""
    path = os.path.expanduser(pattern)
    return [path] if os.path.isfile(path) else sorted(glob.glob(path))


def find_files(patterns: Iterable[str]) -> list[DataFile]:
    """Return the files of paths or URLs, which may be globs."""
    return [found_file(name) for pattern in patterns for name in _expanded(pattern)]


def _expanded(pattern: str) -> list[str]:
    if not is_url(pattern):
        found = matching_paths(pattern)
    elif not any(sign in pattern.partition("://")[2] for sign in "*["):
        return [pattern]
    else:
        system, path = _file_system(pattern)
        found = [system.unstrip_protocol(one) for one in sorted(attempted(pattern, lambda: system.glob(path)))]
    if not found:
        raise InputError(f"There is no file {pattern}: check the name.")
    return found


def found_file(name: str) -> DataFile:
    """Return the file of this path or URL as it is now."""
    if not is_url(name):
        size, modified = file_state(name)
        if size < 0:
            raise changed(name, "disappeared")
        return DataFile(name, size, str(modified))
    system, path = _file_system(name)
    info = attempted(name, lambda: system.info(path))
    version = next((str(info[key]) for key in VERSIONS if info.get(key) is not None), "")
    return DataFile(name, info.get("size"), version)


def file_state(path: Path | str) -> tuple[int, int]:
    """Return a file's size and modification time; (-1, -1) if there is none."""
    state = require_regular(path)
    return (-1, -1) if state is None else (state.st_size, state.st_mtime_ns)


def read_file(path: Path | str, name: str, before: tuple[int, int] | None, offset: int = 0, size: int = -1) -> bytes:
    """Return bytes of a file; raise BadImage, with the image's name, if they cannot be read, InputError if it has changed.

    `before` is the result of `file_state` when the data were opened; None if the file may change.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(size)
            # After reading, so that a file that is being written is noticed too.
            state = os.fstat(file.fileno())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and before not in (None, (-1, -1)):
            raise changed(path, "disappeared") from error
        raise BadImage(name, error.strerror or str(error)) from error
    if before not in (None, (state.st_size, state.st_mtime_ns)):
        raise changed(path)
    return content


def changed(file: object, how: str = "changed") -> InputError:
    """Return the error for a file that is no longer what it was when the data were opened."""
    return InputError(
        f"{file} has {how} since the data were opened: restore it and resume the run, or start a new one."
    )


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL; fsspec makes a new one in a forked process."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}.get(protocol)
        raise MissingExtra(url, package or "fsspec", "remote") from error
    except ValueError as error:
        raise InputError(f"{url} cannot be opened ({first_line(error)}): give a URL that fsspec knows.") from error


def attempted(name: str, work: Callable[[], Result]) -> Result:
    """Return `work()`, which reads a file; for a URL, failures of the store or the network are retried."""
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except InputError:
            raise
        # Each store, and each kind of damaged file, has its own exceptions.
        except Exception as error:
            # Over http, fsspec reports any failure as FileNotFoundError; its cause has the status.
            if isinstance(error, FileNotFoundError) and getattr(error.__cause__, "status", 404) == 404:
                raise InputError(f"There is no file {name}: check the name.") from error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            reason = f"{name} cannot be read ({type(error).__name__}: {first_line(error).rstrip('.')})"
            if not is_url(name):
                raise InputError(f"{reason}: give a whole file.") from error
            if attempt == ATTEMPTS - 1:
                raise InputError(f"{reason}: check the network and your permissions; a run can be resumed.") from error
            time.sleep(2**attempt / 2)
    raise AssertionError


def _forget_oldest(folder: Path) -> None:
    """Remove the least recently used files above the limit; BLOCKS_KEPT files always stay."""
    limit, total = gib_from("STOP_MIM_REMOTE_GIB", REMOTE_GIB), 0
    states = []
    for path in folder.iterdir():
        # Another thread or process may remove files at the same time.
        with suppress(FileNotFoundError):
            if path.name[0] != ".":
                states.append((path, path.stat()))
    states.sort(key=lambda item: item[1].st_mtime_ns, reverse=True)
    for number, (path, state) in enumerate(states):
        total += state.st_size
        if total > limit and number >= BLOCKS_KEPT:
            path.unlink(missing_ok=True)
