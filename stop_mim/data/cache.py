"""Where downloads and derived files live, and how they are written: whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def cache_folder() -> Path:
    """The folder of derived files: $STOP_MIM_CACHE or ~/.cache/stop-mim."""
    return Path(os.environ.get("STOP_MIM_CACHE") or "~/.cache/stop-mim").expanduser()


def download_folder() -> Path:
    """The folder of downloaded data sets: $STOP_MIM_DATA or ~/.cache/stop-mim/data."""
    return Path(os.environ.get("STOP_MIM_DATA") or "~/.cache/stop-mim/data").expanduser()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which takes its final name only if the block ends well; safe with several writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
