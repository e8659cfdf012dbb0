"""PyTorch's pickled files, of which nothing is read but tensors, plain values and NumPy's numbers: no code of theirs runs."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stop_mim.errors import InputError

SCALAR: Any = np.float64(0).__reduce__()[0]
# Old training scripts store a loss or a rate as NumPy's number; NumPy has moved the function that makes it since.
NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)),
]


def read_pickle(path: Path) -> Any:
    """What a file of torch.save's holds, on the CPU; anything but tensors, plain values and numbers is an InputError."""
    try:
        with torch.serialization.safe_globals(NUMBERS), warnings.catch_warnings():
            # What torch thinks of a pickle that is none of its own is said below.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds {named[1]}, which is no tensor" if named else "holds more than tensors"
        raise InputError(
            f"{path} {what}: such a file can run code when it is opened, so it is not; save its tensors alone."
        ) from error
    # A file that is cut off or something else altogether fails in as many ways as there are places to cut it.
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}): it is cut off or something else; "
            "download or copy it again."
        ) from error
