"""Several processes under torchrun: who this one is, and how a model is shared. The place for sharded models is `share`."""

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
    """This process among all."""

    rank: int
    world_size: int
    processes_on_host: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes."""
        return self.rank == 0


@contextmanager
def process_group(device_name: str = "auto") -> Iterator[Ranks]:
    """Join the other processes, if torchrun started some, for the time of the context; a group that exists is used.

    Several runs in one process need such a group around them: torch cannot join the same processes a second time.
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
    """The device of that name; auto and cuda are the GPU of this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"speed.device is '{name}': choose auto, cpu, cuda or cuda:NUMBER.") from error
    if device.type == "cuda":
        # From the name: torch keeps indices in eight bits, and takes cuda:256 for cuda:0.
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
    """The model as all processes train it: gradients are averaged over them."""
    if ranks.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)


def reduce_mean(value: Tensor, ranks: Ranks) -> Tensor:
    """The mean over all processes."""
    if ranks.world_size > 1:
        dist.all_reduce(value)
        value = value / ranks.world_size
    return value


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is set in any process."""
    if ranks.world_size == 1:
        return flag
    value = torch.tensor(float(flag), device=ranks.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def broadcast(value: Any, ranks: Ranks) -> Any:
    """The main process's value, in all processes."""
    if ranks.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all(ranks: Ranks) -> None:
    """Until every process is here."""
    if ranks.world_size > 1:
        dist.barrier()
