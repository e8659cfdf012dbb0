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


def read_sharded(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Return step, whole tensors and plain values of a directory; raise InputError if something is missing or damaged."""
    try:
        contents = json.loads((path / STATE_FILE).read_text())
        if contents["format"] != DIRECTORY_FORMAT:
            raise InputError(f"its format is {contents['format']}")
        for name, checksum in contents["files"].items():
            if _checksum(path / Path(name).name) != checksum:
                raise InputError(f"{name} has a wrong checksum")
        return int(contents["step"]), _read_tensors(path), dict(contents["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{type(error).__name__}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(path))
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It says that this process reads alone, as it is asked to.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
