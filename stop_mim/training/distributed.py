"""Several processes under torchrun: ranks, the process group, and how a model is shared between them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stop_mim.errors import InputError, ProcessLost
from stop_mim.training.config import DeviceConfig, Sharding, SpeedConfig
from stop_mim.training.watch import watch


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
def process_group(speed: DeviceConfig) -> Iterator[Ranks]:
    """Join the process group if torchrun started several processes, and watch them; an existing group is used as it is.

    Several runs in one process need one such context around them: torch cannot join the same group twice. A single
    process has a group only if it shards.
    """
    joined, local_rank = dist.is_initialized(), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
    device = choose_device(speed.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shards = isinstance(speed, SpeedConfig) and speed.sharding != "none"
    if world_size == 1 and not shards:
        yield Ranks(0, 1, 1, device)
        return
    with watch.over(rank, world_size, 60 * speed.timeout_minutes), watch.explaining():
        if not joined:
            # Sharded checkpoints are saved from the CPU's memory, in the background.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            if world_size == 1:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            else:
                dist.init_process_group(backend)
        try:
            with watch.explaining():
                yield Ranks(rank, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), device)
        finally:
            if not joined and not isinstance(sys.exception(), ProcessLost):
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


def distribute(
    model: nn.Module, ranks: Ranks, sharding: Sharding = "none", half: bool = False, reshard: bool = True
) -> nn.Module:
    """Make gradients the mean over all processes; with sharding, also spread the weights over them.

    Args:
        model: the same weights in every process.
        sharding: "none": every process has all weights (DDP); "full" and "hybrid": see `SpeedConfig.sharding` (FSDP2).
        half: gather the sharded weights of layers in bf16, on a GPU. What is updated, and gradients, stay fp32.
        reshard: gather sharded weights again for the backward pass.
    """
    if sharding != "none":
        return shard(model, device_mesh(ranks, sharding), half and ranks.device.type == "cuda", reshard)
    if ranks.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)


def device_mesh(ranks: Ranks, sharding: Sharding) -> DeviceMesh:
    """Return the processes as a line, or as a grid of hosts and of the processes on one."""
    if sharding == "full":
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    if ranks.world_size % ranks.processes_on_host:
        raise InputError(
            f"speed.sharding is hybrid and {ranks.world_size} processes are not a multiple of the {ranks.processes_on_host} on "
            "this machine: start the same number on every machine."
        )
    shape = (ranks.world_size // ranks.processes_on_host, ranks.processes_on_host)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, half: bool = False, reshard: bool = True) -> nn.Module:
    """Shard all weights in place, layer by layer, so that only the layer that is computed is whole."""
    # Inputs are left to autocast.
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if half
        else MixedPrecisionPolicy()
    )
    for layer in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The rest is small: embeddings, positions and A stay fp32, and with them the sums that run through the layers.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_cut_to_shards)
        if isinstance(module, FSDPModule):
            module.reshards = reshard and module is not model  # type: ignore[assignment]
    return model


def _cut_to_shards(module: nn.Module, tensors: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Let `load_state_dict` of a sharded module take whole tensors."""
    for name, parameter in module._parameters.items():
        whole = tensors.get(prefix + name)
        if isinstance(parameter, DTensor) and whole is not None:
            tensors[prefix + name] = sharded_like(parameter, whole)


def sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this process's shard of a tensor if the parameter is sharded, or else the tensor; nothing is sent."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor) or whole.shape != parameter.shape:
        return whole
    on_device = whole.to(parameter.to_local().device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the weights of a model are spread over the processes."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights of a sharded model, so that each process can use it alone; all of them must enter."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    half = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    try:
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(bool(part.reshards), recurse=False)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of which this process may have a shard; all processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    with watch.waits():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)


def broadcast(value: Any, ranks: Ranks) -> Any:
    """Return the value of the main process."""
    if ranks.world_size == 1:
        return value
    box = [value]
    with watch.waits():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def require_same(what: str, value: object, ranks: Ranks) -> None:
    """Raise InputError in all processes unless the value is the same in all."""
    if ranks.world_size == 1:
        return
    values: list[object] = [None] * ranks.world_size
    with watch.waits():
        dist.all_gather_object(values, value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise InputError(
            f"{what} of process {others[0]} differ from those of process 0: give all machines the same files."
        )


def wait_for_all(ranks: Ranks) -> None:
    """Wait until every process is here."""
    if ranks.world_size > 1:
        with watch.waits():
            dist.barrier()


def on_main(ranks: Ranks, work: Callable[[], object]) -> None:
    """Call a function in the main process; the others wait for it."""
    if ranks.is_main:
        work()
    wait_for_all(ranks)
