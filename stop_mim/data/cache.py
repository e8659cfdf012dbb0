"""The cache on disk: files that can be made again, each with a record of what it must be.

A file is written once, by one process, while others wait for it; a damaged file is written again.
"""

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stop_mim.errors import InputError
from stop_mim.files import locked, remove_temporaries, why_not_written, write_atomically

_BYTES_AT_ONCE = 2**24

Record = dict[str, Any]
"""What is known of a cached file, as JSON."""


class CacheError(InputError):
    """The cache cannot be written."""


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache, what its writer recorded of it, and whether it was written just now."""

    path: Path
    record: Record
    fresh: bool


def cached_file(
    name: str,
    write: Callable[[Path], Record | None],
    needed_bytes: int = 0,
    checked: bool = True,
    is_valid: Callable[[Record], bool] = lambda record: True,
) -> CachedFile:
    """Return the file of that name in the cache folder, written first if it is missing, damaged or not valid.

    Args:
        name: path, relative to the cache folder, with a key of all that the contents depend on.
        write: writes the file at the path that it is given, and returns what is to be recorded.
        needed_bytes: space that the file needs; with less on the disk nothing is written.
        checked: compare the whole file with its checksum, not only its size.
        is_valid: whether what was recorded still holds.

    Raises:
        CacheError: the file cannot be written.
    """
    path = cache_folder() / name
    found = _read(path, checked, is_valid)
    if found is not None:
        return CachedFile(path, found, fresh=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / f".{path.name}.lock", wait=True):
            found = _read(path, checked, is_valid)
            if found is not None:
                return CachedFile(path, found, fresh=False)
            remove_temporaries(path.parent, [path.name, record_path(path).name])
            if shutil.disk_usage(path.parent).free < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return CachedFile(path, _write(path, write, checked), fresh=True)
    except OSError as error:
        raise _not_written(path.parent, error.strerror or str(error)) from error


def _not_written(folder: Path, reason: str) -> CacheError:
    return CacheError(
        f"The cache folder {folder} cannot be written ({reason}): set STOP_MIM_CACHE to a folder with room."
    )


def is_cached(path: Path) -> bool:
    """Return whether a file of the cache is there and has its recorded size."""
    return _read(path, False, lambda record: True) is not None


def _write(path: Path, write: Callable[[Path], Record | None], checked: bool) -> Record:
    record: Record = {}

    def fill(draft: Path) -> None:
        record.update(write(draft) or {})
        record.update(bytes=draft.stat().st_size, checksum=_checksum(draft) if checked else None)

    # The record comes last: without it the file is not there.
    record_path(path).unlink(missing_ok=True)
    write_atomically(path, fill)
    text = json.dumps(record)
    write_atomically(record_path(path), lambda draft: draft.write_text(text + "\n"))
    # As JSON gives it back.
    return json.loads(text)


def _read(path: Path, checked: bool, is_valid: Callable[[Record], bool]) -> Record | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(record_path(path).read_text())
        same = record["bytes"] == path.stat().st_size and (not checked or record["checksum"] == _checksum(path))
        return record if same and is_valid(record) else None
    return None


def record_path(path: Path) -> Path:
    """Return the record of a cached file."""
    return path.with_name(path.name + ".json")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_BYTES_AT_ONCE):
            checksum = zlib.crc32(part, checksum)
    return checksum


def cache_folder() -> Path:
    """Return the folder of cached files: $STOP_MIM_CACHE or ~/.cache/stop-mim."""
    return Path(os.environ.get("STOP_MIM_CACHE") or "~/.cache/stop-mim").expanduser()


def require_writable_cache(folder: Path) -> None:
    """Raise CacheError if nothing can be written in a folder of the cache; for use before long work."""
    if refusal := why_not_written(folder):
        raise _not_written(folder, refusal)


def download_folder() -> Path:
    """Return the folder of downloaded datasets: $STOP_MIM_DATA or ~/.cache/stop-mim/data."""
    return Path(os.environ.get("STOP_MIM_DATA") or "~/.cache/stop-mim/data").expanduser()


def gib_from(variable: str, default: float) -> int:
    """Return a limit in bytes that an environment variable gives in GiB; 0 keeps nothing."""
    given = os.environ.get(variable) or str(default)
    try:
        limit = float(given)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise InputError(f"{variable} is '{given}': give a number of GiB; 0 keeps nothing.")
    return int(limit * 2**30)
