"""The disk cache, for files that can be made again.

The name of a file contains a key of everything that its contents depend on. One process writes a file while others wait; a
file that exists is complete.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stop_mim.errors import InputError, first_line
from stop_mim.files import locked, remove_temporaries, user_path, why_not_written, write_atomically

_locks: dict[Path, threading.Lock] = {}
# A lock that another thread holds while workers are forked would never be released there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


class CacheError(InputError):
    """The cache cannot be written."""


def cached_file(name: str, write: Callable[[Path], object]) -> Path:
    """Return the cached file (or folder) of this name; if it is missing, `write(path)` makes it. Raises CacheError."""
    path = cache_folder() / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lock file keeps out other processes, but not the threads of this one.
        with _locks.setdefault(path, threading.Lock()), locked(path.parent / f".{path.name}.lock", wait=True):
            if not path.exists():
                remove_temporaries(path.parent, [path.name])
                write_atomically(path, write)
    except OSError as error:
        raise _not_written(path.parent, error.strerror or str(error)) from error
    return path


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn any failure to read a cached file into an InputError that names the file."""
    try:
        yield
    # Each file format has its own exceptions.
    except Exception as error:
        raise InputError(f"The cached file {path} cannot be read ({first_line(error)}): delete it.") from error


def cache_folder() -> Path:
    """Return the folder of cached files: $STOP_MIM_CACHE or ~/.cache/stop-mim."""
    return user_path(os.environ.get("STOP_MIM_CACHE") or "~/.cache/stop-mim")


def download_folder() -> Path:
    """Return the folder of downloaded datasets: $STOP_MIM_DATA or ~/.cache/stop-mim/data."""
    return user_path(os.environ.get("STOP_MIM_DATA") or "~/.cache/stop-mim/data")


def require_writable_cache(folder: Path) -> None:
    """Raise CacheError if a folder of the cache cannot be written; for use before long work."""
    if refusal := why_not_written(folder):
        raise _not_written(folder, refusal)


def _not_written(folder: Path, reason: str) -> CacheError:
    return CacheError(
        f"The cache folder {folder} cannot be written ({reason}): set STOP_MIM_CACHE to a folder with room."
    )


def gib_from(variable: str, default: float) -> int:
    """Read a limit in GiB from an environment variable and return it in bytes."""
    given = os.environ.get(variable) or str(default)
    try:
        limit = float(given)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise InputError(f"{variable} is '{given}': give a number of GiB, 0 or more.")
    return int(limit * 2**30)
