"""Where downloads and derived files live."""

import math
import os
from pathlib import Path

from stop_mim.errors import InputError
from stop_mim.files import why_not_written

DECODED_GIB = 4.0
"""Sets of decoded images above this size are not kept."""


def cache_folder() -> Path:
    """The folder of derived files: $STOP_MIM_CACHE or ~/.cache/stop-mim."""
    return Path(os.environ.get("STOP_MIM_CACHE") or "~/.cache/stop-mim").expanduser()


def require_writable_cache(folder: Path) -> None:
    """Complain if nothing can be kept in a folder of derived files; to be asked before long work whose results go there."""
    if refusal := why_not_written(folder):
        raise InputError(
            f"The cache folder {folder} cannot be written ({refusal}): set STOP_MIM_CACHE to a folder that can."
        )


def download_folder() -> Path:
    """The folder of downloaded data sets: $STOP_MIM_DATA or ~/.cache/stop-mim/data."""
    return Path(os.environ.get("STOP_MIM_DATA") or "~/.cache/stop-mim/data").expanduser()


def decoded_limit() -> int:
    """The most bytes of a set of decoded images that is kept in the cache folder: $STOP_MIM_DECODED_GIB or 4 GiB; 0 is none."""
    given = os.environ.get("STOP_MIM_DECODED_GIB") or str(DECODED_GIB)
    try:
        limit = float(given)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise InputError(f"STOP_MIM_DECODED_GIB is '{given}': give a number of GiB, or 0 to keep no decoded images.")
    return int(limit * 2**30)
