"""Checkpoint files: written atomically, verified by a checksum when they are read.

The checkpoint of a sharded model is a directory. Every process writes its shards to it in the background, as safetensors,
with `torch.distributed.checkpoint`. `state.json`, written last, has the plain values and a checksum of every file.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stop_mim.errors import InputError
from stop_mim.files import read_safetensors, remove, require_regular, sync_folder, write_atomically
from stop_mim.models.objective import local_part
from stop_mim.training.distributed import sharded_like

FILE_VERSION = 1
FILE_FORMAT = f"stop-mim checkpoint {FILE_VERSION}"
SUFFIX, STATE_FILE = ".sharded", "state.json"
DIRECTORY_FORMAT = "stop-mim sharded checkpoint 1"
LARGE = ("model.", "optimiser.")
"""What the names of sharded tensors begin with; the others belong to callbacks."""


class NewerCheckpoint(InputError):
    """A checkpoint that only a newer version of stop-mim can read."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"The checkpoint {path} was saved by a newer version of stop-mim: install that version, or start a new run."
        )


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to continue a training: tensors by name, and plain values."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    shards: Path | None = None
    """Where the values of tensors on the meta device are."""


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint atomically, with a checksum of its contents."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in checkpoint.tensors.items()}
    metadata = {"format": FILE_FORMAT, "step": str(checkpoint.step), "state": json.dumps(checkpoint.state)}
    metadata["checksum"] = _checksum(tensors, metadata)
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def read_checkpoint(path: Path, whole: bool = True) -> Checkpoint:
    """Read and verify a checkpoint; raise InputError if the file is not a good one.

    The tensors are mapped: the file keeps its space on the disk until they are gone, even if it is deleted. Those of a
    sharded checkpoint are put together in memory, or, if `whole` is False, left to `restore_tensors`.
    """
    remedy = "resume from an older one with --checkpoint FILE, or start a new run"
    try:
        if path.suffix == SUFFIX:
            return Checkpoint(*read_sharded(path, whole), shards=path)
        tensors, metadata = read_safetensors(path)
    except (InputError, OSError) as error:
        reason = str(error).rstrip(".")
        raise InputError(f"The checkpoint {path} cannot be read ({reason}): {remedy}.") from error
    if metadata.get("format") != FILE_FORMAT:
        version = re.fullmatch(r"stop-mim checkpoint (\d+)", metadata.get("format", ""))
        if version is not None and int(version[1]) > FILE_VERSION:
            raise NewerCheckpoint(path)
        raise InputError(f"{path} is not a checkpoint of stop-mim: {remedy}.")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise InputError(f"The checkpoint {path} is damaged (wrong checksum): {remedy}.")
    return Checkpoint(int(metadata["step"]), tensors, json.loads(metadata["state"]))


def begin_save(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> Future[Any]:
    """Copy this process's shards and write them to a directory in the background; all processes must call it.

    `group` is a second process group, in which the processes wait for one another in the background.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    kept = {name: tensor.detach() for name, tensor in tensors.items()}
    return dcp.async_save(kept, storage_writer=writer, process_group=group)  # type: ignore[return-value]


def wait_for_shards(writing: Future[Any], path: Path) -> None:
    """Wait until all processes have written their shards; an OSError of any of them is raised here, with the path."""
    try:
        writing.result()
    except CheckpointException as error:
        causes = (cause for cause, _ in error.failures.values() if isinstance(cause, OSError))
        if (cause := next(causes, None)) is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def finish_save(folder: Path, path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Add the plain values to a directory whose shards are written, and give it its name in one step."""
    files = {file.name: _file_checksum(file) for file in sorted(folder.glob("*.safetensors"))}
    contents = {"format": DIRECTORY_FORMAT, "step": step, "state": state, "files": files}
    # The shards are on the disk already.
    write_atomically(folder / STATE_FILE, lambda file: file.write_text(json.dumps(contents)))
    shutil.rmtree(path, ignore_errors=True)
    folder.replace(path)
    sync_folder(path.parent)


def read_sharded(path: Path, whole: bool = True) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Return step, tensors and plain values of a directory; raise InputError if something is missing or damaged.

    Unless `whole` is set, tensors of model and optimiser are on the meta device, for `load_shards`.
    """
    try:
        require_regular(path / STATE_FILE)
        contents = json.loads((path / STATE_FILE).read_text())
        if contents["format"] != DIRECTORY_FORMAT:
            raise InputError(f"its format is {contents['format']}")
        for name, checksum in contents["files"].items():
            if _file_checksum(path / Path(name).name) != checksum:
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
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{type(error).__name__}: {error}") from error


def load_shards(path: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors by name; of a sharded tensor, this process reads only its shard."""
    with warnings.catch_warnings():
        # torch warns that only this process reads.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(dict(into), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def collect_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of model and optimiser, the latter under the names of their parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, values in optimiser.state.items():
        for key, value in values.items():
            tensors[f"optimiser.{key}.{names[parameter]}"] = torch.as_tensor(value)
    return tensors


def restore_tensors(checkpoint: Checkpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Load the tensors into model and optimiser; raise InputError if a name or shape does not match."""
    parameters = dict(model.named_parameters())
    targets = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    missing = targets.keys() - checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("optimiser."):
            _, key, parameter_name = name.split(".", 2)
            parameter = parameters.get(parameter_name)
            if parameter is not None and tensor.dim():
                targets[name] = torch.zeros_like(parameter, dtype=tensor.dtype)
            elif parameter is not None:
                # AdamW keeps its step counters, the only scalars, on the CPU unless it is fused.
                device = parameter.device if optimiser.defaults.get("fused") else "cpu"
                targets[name] = torch.zeros((), dtype=tensor.dtype, device=device)
        if name.startswith(LARGE) and (name not in targets or targets[name].shape != tensor.shape):
            missing.add(name)
    if missing:
        raise InputError(
            f"The checkpoint of step {checkpoint.step} does not fit this run ({min(missing)}): start a new run."
        )
    if checkpoint.shards is not None:
        load_shards(checkpoint.shards, targets)
    for name, target in targets.items():
        if checkpoint.shards is None:
            local_part(target.detach()).copy_(local_part(sharded_like(target, checkpoint.tensors[name])))
        if name.startswith("optimiser."):
            _, key, parameter_name = name.split(".", 2)
            optimiser.state[parameters[parameter_name]][key] = target


def checkpoint_path(folder: Path, step: int, suffix: str = ".safetensors") -> Path:
    """Return the path of the checkpoint after this number of steps; a sharded one is a directory."""
    return folder / f"step-{step:08d}{suffix}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a directory by step, oldest first."""
    found = [path for suffix in (SUFFIX, ".safetensors") for path in folder.glob(f"step-*{suffix}")]
    files = {path.stem.removeprefix("step-"): path for path in found}
    return dict(sorted((int(step), path) for step, path in files.items() if step.isdecimal()))


def prune_checkpoints(folder: Path, keep: int, milestone_every_steps: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints and the milestones."""
    steps = checkpoints_in(folder)
    for step in list(steps)[:-keep]:
        if milestone_every_steps is None or step % milestone_every_steps:
            remove(steps[step])


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _file_checksum(file: Path) -> str:
    require_regular(file)
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
