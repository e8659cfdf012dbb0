"""Atomic writes, checks of paths, and locks between processes."""

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from stop_mim.errors import InputError

SECONDS_A_DAY = 86400.0


def require_writable(name: str, path: Path, remedy: str = "give a file in a folder that can be written") -> None:
    """Raise InputError if no file can be written at `path`; leaves nothing there."""
    folder = path.absolute().parent
    if path.is_dir():
        obstacle = "is a folder"
    elif path.exists() and not path.is_file():
        obstacle = "is not a regular file"
    elif not folder.is_dir():
        obstacle = "is in a folder that does not exist"
    elif refusal := why_not_written(folder):
        obstacle = f"is in a folder that cannot be written ({refusal})"
    else:
        return
    raise InputError(f"{name} cannot be written: it {obstacle}; {remedy}.")


def require_creatable(folder: Path) -> None:
    """Raise InputError if a folder does not exist and cannot be created, or cannot be written; leaves nothing there."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be created ({existing} is not a writable folder): choose another --out.")


def why_not_written(folder: Path) -> str:
    """Create a folder, and return the reason why files cannot be written to it; "" if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def user_path(name: str | Path) -> Path:
    """Return a path in which ~ and ~USER are replaced; a user who does not exist has no home, and the path stays as it is."""
    return Path(os.path.expanduser(name))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary path)` to make a file or a folder, then move it to `path` in one step.

    A link is kept and its target is written; a device or a pipe is never replaced by a file. The file and its name are synced
    to the disk. A full disk is an OSError, also if safetensors writes the file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder, because safetensors writes another temporary file next to the given one.
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        draft = folder / path.name
        with failures_as_oserror(path):
            write(draft)
        umask = os.umask(0)
        os.umask(umask)
        for part in [draft, *draft.rglob("*")]:
            if part.is_file():
                with part.open("rb+") as file:
                    os.fsync(file.fileno())
            # Some libraries write files that only their owner can read; ours have the permissions of the umask.
            part.chmod((0o777 if part.is_dir() else 0o666) & ~umask)
        draft.replace(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def append_line(path: Path, text: str) -> None:
    """Add a line to a file; an error names the file."""
    with failures_as_oserror(path), path.open("a") as file:
        file.write(text + "\n")


@contextmanager
def failures_as_oserror(path: Path) -> Iterator[None]:
    """Turn the error that safetensors raises for a failed write into OSError; give every OSError the path."""
    try:
        yield
    except OSError as error:
        # A failed write or flush names no file.
        error.filename = error.filename or str(path)
        raise
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, so that a renamed file survives a power failure."""
    # Windows and some file systems cannot do this.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_regular(path: Path | str) -> os.stat_result | None:
    """Return the state of a file, or None if there is none.

    A pipe, a device or a folder is an InputError: reading from a pipe may never end.
    """
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(state.st_mode):
        raise InputError(f"{path} cannot be read: it is a pipe, a device or a folder; give a file.")
    return state


def read_safetensors(path: Path, tensors: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a file, mapped into memory, and its metadata; without `tensors` the metadata alone.

    A damaged file is an InputError.
    """
    require_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}): save or copy it again.") from error


def remove_temporaries(folder: Path, names: Iterable[str], older_than_s: float = 0) -> None:
    """Remove the temporary files of killed processes that were in `write_atomically`.

    `names` are those of the files that were written, or glob patterns of them. Files younger than `older_than_s` are kept:
    without a lock, another process may still be writing them.
    """
    for temporary in [found for name in names for found in folder.glob(f".{name}.????????")]:
        with suppress(OSError):
            if not older_than_s or time.time() - temporary.stat().st_mtime > older_than_s:
                remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock file `path` and remove it at the end; yield False if another process holds it.

    With `wait`, wait for the other process. A process that dies releases its locks, and its children do not inherit them. On a
    file system without locks, every process gets the lock.
    """
    while True:
        with path.open("ab") as file:
            is_ours = _lock(file, wait)
            # After the file was opened here, its holder may have removed it, and another process created a new one.
            is_current = False
            with suppress(FileNotFoundError):
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if wait and not is_current:
                continue
            try:
                yield is_ours and is_current
            finally:
                if is_ours and is_current:
                    path.unlink(missing_ok=True)
            return


def _lock(file: IO[bytes], wait: bool) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
