"""Before a run: what its config leaves open, how many images fit into memory at once, and how fast it will be."""

import gc
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from stop_mim.errors import InputError
from stop_mim.training.acceleration import STEPS_BEFORE_CAPTURE
from stop_mim.training.config import TrainConfig
from stop_mim.training.derived import derive
from stop_mim.training.distributed import Ranks, broadcast
from stop_mim.training.inputs import open_data, split_batch
from stop_mim.training.trainer import Trainer

STEP_PART_OF_GPU = 0.5
"""Of the free memory; images that stay on the GPU have up to 0.4 of it."""
PATCHES_AT_ONCE_ON_CPU = 2**14
"""83 images of 224x224 pixels: more at once are not faster, and take a lot of memory."""
FEW_IMAGES, MORE_IMAGES = 4, 16
"""The memory of a step is linear in the number of images, and measured with these."""


@dataclass(frozen=True)
class Trial:
    """What trial steps measured."""

    seconds_per_step: float
    memory: int
    """Largest number of bytes in use: on the GPU, or else of the whole process."""


def settle(
    config: TrainConfig,
    ranks: Ranks,
    say: Callable[[str], None],
    memory_of_step: Callable[[TrainConfig, torch.device, int], int],
) -> TrainConfig:
    """Decide what the config leaves open: the fields of `optim.derive`, and the images that a device sees at once.

    config.json keeps the decision for resumed runs. `memory_of_step` returns the bytes of a step on a device with a number
    of images.
    """
    if config.optim.derive:
        config = derive(config, len(open_data(config)), ranks.device.type, ranks.world_size)
    # The memory of sharded weights depends on all processes together.
    if config.speed.batch_size_per_device is not None or config.speed.sharding != "none":
        return config
    per_step, _ = split_batch(config, ranks)
    if ranks.device.type == "cpu":
        height, width = (side // config.encoder.patch_size for side in config.encoder.image_size)
        at_once = largest_divisor(per_step, PATCHES_AT_ONCE_ON_CPU / max(1, height * width))
    else:
        # What an earlier run of this process left behind can be used.
        forget_peak(ranks.device)
        free = torch.cuda.mem_get_info(ranks.device)[0]
        say(f"measuring  how many images fit into {free / 2**30:.1f} GiB of free GPU memory at once")
        memory_of = partial(memory_of_step, config, ranks.device)
        at_once = broadcast(images_at_once(per_step, memory_of, STEP_PART_OF_GPU * free), ranks)
        forget_peak(ranks.device)
    return replace(config, speed=replace(config.speed, batch_size_per_device=at_once))


def take_trial_steps(trainer: Trainer, timed: int) -> Trial:
    """Measure steps of a run that has not begun, with its own batches, and undo them."""
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.model.state_dict().items()}
    # Compiling and capturing happen in the first steps, and stay for the run.
    trial = measure_steps(trainer, STEPS_BEFORE_CAPTURE + 2 if trainer.ranks.device.type == "cuda" else 1, timed)
    # In place, where a captured graph reads and writes them; AdamW begins with zeros.
    trainer.model.load_state_dict(weights)
    for state in trainer.optimiser.state.values():
        for tensor in state.values():
            tensor.zero_()
    trainer.done = 0
    return trial


def measure_steps(trainer: Trainer, first: int = 1, timed: int = 1) -> Trial:
    """Measure the peak of the memory of all these steps, and the time of those after the first."""
    device = trainer.ranks.device
    forget_peak(device)
    with closing(trainer.batches(0)) as batches:
        for _ in range(first):
            trainer.take_step(batches)
        wait_for(device)
        start = time.perf_counter()
        for _ in range(timed):
            trainer.take_step(batches)
        wait_for(device)
        return Trial((time.perf_counter() - start) / timed, peak_memory(device))


def images_at_once(per_step: int, memory_of: Callable[[int], int], budget: float) -> int:
    """Return the largest divisor of a step's images that fits into a budget of bytes; up to 16 are never divided.

    `memory_of` returns the bytes that a step with a number of images needs.
    """
    if per_step <= MORE_IMAGES:
        return per_step
    try:
        few = memory_of(FEW_IMAGES)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"A step of {FEW_IMAGES} images does not fit into the free GPU memory: free some, choose a smaller encoder.size or "
            "encoder.image_size, or add --speed.recompute."
        ) from error
    try:
        an_image = max(1.0, (memory_of(MORE_IMAGES) - few) / (MORE_IMAGES - FEW_IMAGES))
    except torch.OutOfMemoryError:
        an_image = budget
    return largest_divisor(per_step, FEW_IMAGES + (budget - few) / an_image)


def largest_divisor(number: int, at_most: float) -> int:
    """Return the largest divisor of a number within a limit; 1 if the limit is lower."""
    return next((one for one in range(int(min(number, at_most)), 1, -1) if number % one == 0), 1)


def forget_peak(device: torch.device) -> None:
    """Free unused memory and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return bytes: the GPU's peak of allocated tensors since `forget_peak`; on the CPU the peak of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # macOS counts bytes, others count kibibytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
