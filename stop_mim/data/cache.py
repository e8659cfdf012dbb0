"""Where downloads and derived files live."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of derived files: $STOP_MIM_CACHE or ~/.cache/stop-mim."""
    return Path(os.environ.get("STOP_MIM_CACHE") or "~/.cache/stop-mim").expanduser()


def download_folder() -> Path:
    """The folder of downloaded data sets: $STOP_MIM_DATA or ~/.cache/stop-mim/data."""
    return Path(os.environ.get("STOP_MIM_DATA") or "~/.cache/stop-mim/data").expanduser()
