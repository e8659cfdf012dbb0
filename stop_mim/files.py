"""Files that are either whole or not there."""

import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stop_mim.errors import InputError


def require_writable(name: str, path: Path, remedy: str = "name a file in a folder that can be written") -> None:
    """Refuse, before any work is done, a path that no file could be put to in the end; nothing is left there."""
    if obstacle := _obstacle(path):
        raise InputError(f"{name} cannot be written: it {obstacle}; {remedy}.")


def _obstacle(path: Path) -> str:
    folder = path.absolute().parent
    if path.is_dir():
        return "is a folder"
    if path.exists() and not path.is_file():
        return "is no plain file"
    if not folder.is_dir():
        return "is in a folder that does not exist"
    refusal = why_not_written(folder)
    return f"is in a folder that cannot be written ({refusal})" if refusal else ""


def why_not_written(folder: Path) -> str:
    """Why no file can be made in a folder, which is made if need be, in the system's words; nothing if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then put it in the place of `path` in one step.

    A link stays, and what it points to is written; a device or a pipe is never replaced by a file.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
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


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Have the file `path` for this process alone, and remove it in the end; gives False where another process has it.

    A process that dies lets go of it, and its children never hold it. Where a file system knows no locks, all have it.
    """
    with path.open("ab") as file:
        # Another process may have removed the file between the two, and a third one made it anew.
        is_ours = _lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        try:
            yield is_ours
        finally:
            if is_ours:
                path.unlink(missing_ok=True)


def _lock(file: IO[bytes]) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
