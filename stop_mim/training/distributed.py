"""Several processes under torchrun: ranks, the process group, and how a model is shared between them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stop_mim.errors import InputError


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of a run."""

    rank: int
    world_size: int
    processes_on_host: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


@contextmanager
def process_group(device_name: str = "auto") -> Iterator[Ranks]:
    """Join the process group if torchrun started several processes; an existing group is used as it is.

    Several runs in one process need one such context around them: torch cannot join the same group twice.
    """
    joined, local_rank = dist.is_initialized(), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, 1, device)
        return
    if not joined:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), device)
    finally:
        if not joined:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of that name; "auto" and "cuda" are the GPU of this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"speed.device is '{name}': choose auto, cpu, cuda or cuda:NUMBER.") from error
    if device.type == "cuda":
        # Parsed from the name: torch stores indices in eight bits and reads cuda:256 as cuda:0.
        index = int(name.partition(":")[2] or local_rank)
        if index >= torch.cuda.device_count():
            raise InputError(
                f"speed.device is '{name}': this machine has {torch.cuda.device_count()} GPUs; use cpu or auto."
            )
        device = torch.device("cuda", index)
    elif device.type != "cpu":
        raise InputError(f"speed.device is '{name}': choose auto, cpu, cuda or cuda:NUMBER.")
    return device


def share(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Wrap the model so that gradients are averaged over all processes. Sharded training would go here."""
    if ranks.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)


def reduce_mean(value: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean over all processes."""
    if ranks.world_size > 1:
        dist.all_reduce(value)
        value = value / ranks.world_size
    return value


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Return whether the flag is set in any process."""
    if ranks.world_size == 1:
        return flag
    value = torch.tensor(float(flag), device=ranks.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def broadcast(value: Any, ranks: Ranks) -> Any:
    """Return the value of the main process."""
    if ranks.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all(ranks: Ranks) -> None:
    """Wait until every process is here."""
    if ranks.world_size > 1:
        dist.barrier()
