"""Checkpoints of sharded models: a directory of safetensors to which every process writes its shards, in the background.

`torch.distributed.checkpoint` writes and reads the shards, without pickle. `state.json`, written last, has the plain
values and a checksum of every file.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stop_mim.errors import InputError
from stop_mim.files import sync_folder

SUFFIX, STATE_FILE = ".sharded", "state.json"
DIRECTORY_FORMAT = "stop-mim sharded checkpoint 1"
LARGE = ("model.", "optimiser.")
"""What the names of sharded tensors begin with; the others belong to callbacks."""


def begin_save(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> Future[Any]:
    """Copy this process's shards and write them to a directory in the background; all processes must call it.

    Args:
        tensors: tensors by name, sharded or the same in all processes.
        folder: a directory that exists.
        group: a process group of its own, in which the processes wait for one another in the background.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    kept = {name: tensor.detach() for name, tensor in tensors.items()}
    return dcp.async_save(kept, storage_writer=writer, process_group=group)  # type: ignore[return-value]


def finish_save(folder: Path, path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Add the plain values to a directory whose shards are written, and give it its name in one step."""
    files = {file.name: _checksum(file) for file in sorted(folder.glob("*.safetensors"))}
    contents = {"format": DIRECTORY_FORMAT, "step": step, "state": state, "files": files}
    (folder / STATE_FILE).write_text(json.dumps(contents))
    shutil.rmtree(path, ignore_errors=True)
    folder.replace(path)
    sync_folder(path.parent)


def read_sharded(path: Path, whole: bool = True) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Return step, tensors and plain values of a directory; raise InputError if something is missing or damaged.

    Args:
        path: the directory.
        whole: put all tensors together; otherwise those of model and optimiser are on the meta device, for `load_shards`.
    """
    try:
        contents = json.loads((path / STATE_FILE).read_text())
        if contents["format"] != DIRECTORY_FORMAT:
            raise InputError(f"its format is {contents['format']}")
        for name, checksum in contents["files"].items():
            if _checksum(path / Path(name).name) != checksum:
                raise InputError(f"{name} has a wrong checksum")
        stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(
                one.size, dtype=one.properties.dtype, device="cpu" if whole or not name.startswith(LARGE) else "meta"
            )
            for name, one in stored.items()
            if isinstance(one, TensorStorageMetadata)
        }
        load_shards(path, {name: tensor for name, tensor in tensors.items() if not tensor.is_meta})
        return int(contents["step"]), tensors, dict(contents["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{type(error).__name__}: {error}") from error


def load_shards(path: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors by name; of a sharded one, this process reads its own shard alone."""
    with warnings.catch_warnings():
        # It says that this process reads alone, as it is asked to.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(dict(into), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
