"""Files at URLs (http, s3, gs and whatever else fsspec knows), kept in a bounded part of the cache while they are used.

A file is fetched whole when one of its images is asked for; the files that were not used for longest go first.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stop_mim.data.cache import cached_file, gib_from, record_path
from stop_mim.data.image_source import changed, digest
from stop_mim.data.order import BLOCKS_AHEAD, BLOCKS_TOGETHER
from stop_mim.errors import InputError, MissingExtra, first_line

REMOTE_GIB = 50.0
"""Files that are kept in the cache, in GiB, unless STOP_MIM_REMOTE_GIB says otherwise."""
BLOCKS_KEPT = 2 * BLOCKS_TOGETHER + BLOCKS_AHEAD
"""Files that are kept whatever their size: those in use, those fetched ahead, and some more."""
ATTEMPTS = 4
# What a store calls the version of a file; the first that it has.
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")

Result = TypeVar("Result")


def is_url(name: str) -> bool:
    """Return whether a name is a URL, such as s3://bucket/file."""
    return "://" in name


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, and what tells its versions apart."""

    url: str
    size: int | None
    version: str

    def __str__(self) -> str:
        return self.url

    def identity(self) -> tuple[str, int | None, str]:
        """Name, size and version."""
        return self.url.rpartition("/")[2], self.size, self.version

    def open(self) -> Any:
        """Open the file; ranges of it are read as they are needed."""
        system, path = _file_system(self.url)
        return system.open(path, "rb")

    def fetched(self, ending: str = "", write: Callable[[Path], None] | None = None) -> Path:
        """Return the file in the cache, fetched if it is not there; `write` makes another file of it, of that ending."""

        def fetch(draft: Path) -> None:
            system, path = _file_system(self.url)
            attempted(self.url, partial(write, draft) if write else partial(system.get_file, path, str(draft)))
            system.invalidate_cache()
            if _find(self.url) != self:
                raise changed(self.url)

        name = f"remote/{digest([self.url, self.size, self.version])}{ending}"
        file = cached_file(name, fetch, checked=False)
        with suppress(FileNotFoundError):
            os.utime(file.path)
        if file.fresh:
            _forget_oldest(file.path.parent)
        return file.path


def find_files(patterns: Iterable[str]) -> list[RemoteFile]:
    """Return the files that URLs name, each of which may be a glob."""
    return [_find(url) for pattern in patterns for url in _expanded(pattern)]


def _expanded(pattern: str) -> list[str]:
    if not any(sign in pattern.partition("://")[2] for sign in "*["):
        return [pattern]
    system, path = _file_system(pattern)
    found = sorted(attempted(pattern, lambda: system.glob(path)))
    if not found:
        raise InputError(f"No file matches {pattern}: check the URL.")
    return [system.unstrip_protocol(one) for one in found]


def _find(url: str) -> RemoteFile:
    system, path = _file_system(url)
    info = attempted(url, lambda: system.info(path))
    version = next((str(info[key]) for key in VERSIONS if info.get(key) is not None), "")
    return RemoteFile(url, info.get("size"), version)


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL; a forked process needs its own, which fsspec sees to."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}.get(protocol)
        raise MissingExtra(url, package or "fsspec", "remote") from error
    except ValueError as error:
        raise InputError(f"{url} cannot be opened ({first_line(error)}): give a URL that fsspec knows.") from error


def attempted(url: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, tried again if the store or the network fails."""
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except InputError:
            raise
        # Each store has its own exceptions.
        except Exception as error:
            # Over http any failure is a file that is not found; its cause has the status.
            if isinstance(error, FileNotFoundError) and getattr(error.__cause__, "status", 404) == 404:
                raise InputError(f"There is no file {url}: check the URL.") from error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
                raise
            if attempt == ATTEMPTS - 1:
                raise InputError(
                    f"{url} cannot be read ({type(error).__name__}: {first_line(error)}): check the network and your "
                    "rights; a run can be resumed then."
                ) from error
            time.sleep(2**attempt / 2)
    raise AssertionError


def _forget_oldest(folder: Path) -> None:
    """Remove the files that were not used for longest, beyond the limit; those in use together always stay."""
    limit, total = gib_from("STOP_MIM_REMOTE_GIB", REMOTE_GIB), 0
    states = []
    for path in folder.iterdir():
        # Another thread or process may remove files meanwhile.
        with suppress(FileNotFoundError):
            if path.suffix != ".json" and path.name[0] != ".":
                states.append((path, path.stat()))
    states.sort(key=lambda item: item[1].st_mtime_ns, reverse=True)
    for number, (path, state) in enumerate(states):
        total += state.st_size
        if total > limit and number >= BLOCKS_KEPT:
            record_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
