"""A new folder that is whole or not there."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from stop_mim.errors import InputError


def require_free(path: Path) -> None:
    """Refuse a place where something is already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty folder: choose another --out.")


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder beside it, then put that in the place of `path` in one step."""
    require_free(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name a folder in one that can.") from error
    try:
        write(temporary)
        for file in temporary.rglob("*"):
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        # mkdtemp's folders are for their owner alone; others may read what we write, as far as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        # The place may hold an empty folder, which this replaces.
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
