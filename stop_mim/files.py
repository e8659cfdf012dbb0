"""Files that are either complete or not there, and locks between processes."""

import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stop_mim.errors import InputError


def require_writable(name: str, path: Path, remedy: str = "name a file in a folder that can be written") -> None:
    """Raise InputError if no file can be written at `path`; leaves nothing there."""
    if obstacle := _obstacle(path):
        raise InputError(f"{name} cannot be written: it {obstacle}; {remedy}.")


def _obstacle(path: Path) -> str:
    folder = path.absolute().parent
    if path.is_dir():
        return "is a folder"
    if path.exists() and not path.is_file():
        return "is not a regular file"
    if not folder.is_dir():
        return "is in a folder that does not exist"
    refusal = why_not_written(folder)
    return f"is in a folder that cannot be written ({refusal})" if refusal else ""


def why_not_written(folder: Path) -> str:
    """Return the system's reason why no file can be made in a folder, which is created; "" if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then move it to `path` in one step.

    A link stays, and its target is written; a device or a pipe is never replaced by a file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp's files are for their owner alone; others may read what we write, as far as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path, names: Iterable[str]) -> None:
    """Remove temporary files that `write_atomically` left in a folder because the process was killed.

    Args:
        folder: the folder.
        names: names of the files that were written, or glob patterns of them; nobody else may be writing them.
    """
    for name in names:
        for temporary in folder.glob(f".{name}.????????"):
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock file `path`, which is removed in the end; yields False if another process holds it.

    With `wait`, waits for the other process. A process that dies releases its locks, and its children never hold them. Where
    a file system has no locks, every process gets them.
    """
    while True:
        with path.open("ab") as file:
            is_ours = _lock(file, wait)
            # Its last holder may have removed the file after it was opened here, and another process made a new one.
            is_current = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
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
