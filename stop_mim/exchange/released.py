"""The .pth.tar files of the I-JEPA and StoP releases: encoder, target encoder and predictor of one training run."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.exchange.importing import encoder_from_timm_names
from stop_mim.files import require_regular
from stop_mim.models.encoder import Encoder

Part = Literal["encoder", "target_encoder"]
PARTS: tuple[Part, ...] = get_args(Part)
PARALLEL = "module."
# The releases' names of the predictor's parts, and ours.
PREDICTOR_PARTS = {
    "predictor_embed": "projection",
    "predictor_blocks": "blocks",
    "predictor_norm": "norm",
    "predictor_proj": "head",
}
# First bytes of files of torch.save: a zip archive, or a pickle of old versions.
TORCH_FILES = (b"PK", b"\x80\x02")
NO_WEIGHTS = (
    "is neither a file of torch.save (.pth, .pth.tar) nor a .safetensors file: name a file of weights, or a run"
)
SCALAR: Any = np.float64(0).__reduce__()[0]
# Old training scripts store losses and learning rates as NumPy scalars; NumPy has since moved the function that makes them.
NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)),
]


def read_pickle(path: Path) -> Any:
    """Read a torch.save file on the CPU; no code in it runs, and anything but tensors and numbers is an InputError."""
    require_regular(path)
    try:
        with torch.serialization.safe_globals(NUMBERS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds {named[1]}, which is not a tensor" if named else "holds more than tensors"
        raise InputError(
            f"{path} {what}: loading it could run code, so it is refused; save its tensors alone."
        ) from error
    # Truncated and foreign files raise many different errors.
    except Exception as error:
        with path.open("rb") as file:
            is_damaged = file.read(2) in TORCH_FILES
        what = f"is damaged ({type(error).__name__}): download or copy it again" if is_damaged else NO_WEIGHTS
        raise InputError(f"{path} {what}.") from error


def is_release(contents: Any) -> bool:
    """Return whether a file's contents have the layout of the releases."""
    return isinstance(contents, Mapping) and any(isinstance(contents.get(part), Mapping) for part in PARTS)


def is_state(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Return whether a value is a mapping from names to tensors."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def state_of(contents: Any, part: str, path: Path) -> dict[str, Tensor]:
    """Return the weights of one part, without the prefix of distributed training."""
    state = contents.get(part) if isinstance(contents, Mapping) else None
    if not is_state(state):
        has = ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else "no names"
        raise InputError(
            f"{path} holds no weights under '{part}', but {has}: name an encoder in it, as {path}#encoder."
        )
    if state and all(name.startswith(PARALLEL) for name in state):
        return {name.removeprefix(PARALLEL): tensor for name, tensor in state.items()}
    return dict(state)


def released_encoder(contents: Any, path: Path, part: Part) -> Encoder:
    """Build one of the two encoders of a file's contents."""
    return encoder_from_timm_names(state_of(contents, part, path), f"{path}#{part}")


class ReleasedModel(NamedTuple):
    """The weights of a released model under our names, and what is stored otherwise here."""

    tensors: dict[str, Tensor]
    positions: Tensor | None
    """The predictor's positions, (1, n_patches, width)."""
    heads: int
    """The number of attention heads of encoder and predictor."""


def released_model(contents: Any, path: Path) -> ReleasedModel:
    """Convert all parts of a file's contents."""
    encoder, target = (released_encoder(contents, path, part) for part in PARTS)
    if encoder.architecture() != target.architecture():
        raise InputError(f"{path} has an encoder and a target encoder of different shapes: download it again.")
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    tensors |= {f"target.{name}": tensor for name, tensor in target.state_dict().items()}
    predictor = state_of(contents, "predictor", path)
    positions = predictor.pop("predictor_pos_embed", None)
    for name, tensor in predictor.items():
        part, dot, rest = name.partition(".")
        tensor = tensor.flatten() if name == "mask_token" else tensor
        tensors[f"predictor.{PREDICTOR_PARTS.get(part, part)}{dot}{rest}"] = tensor.to(torch.float32, copy=True)
    return ReleasedModel(tensors, positions, encoder.heads)
