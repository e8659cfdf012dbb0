"""Images that are in memory already, batch by batch on a device: a GPU gets each while it works on the one before."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

MADE_AHEAD = 2
# One that is filled and one that is copied, beside those that wait to be used.
SLOTS = MADE_AHEAD + 2

Item = TypeVar("Item")


def stacked_batches(
    stacked: UInt8[Tensor, "n 3 height width"], batches: Sequence[Int[Tensor, " _"]], device: torch.device
) -> Generator[UInt8[Tensor, "_ 3 height width"], None, None]:
    """The images that each batch names, in its order; where they may be left early, close the generator."""
    if device.type != "cuda":
        for numbers in batches:
            yield torch.index_select(stacked, 0, numbers).to(device)
        return
    consumer = torch.cuda.current_stream(device)
    with closing(made_ahead(_copied(stacked, batches, device))) as copies:
        for pixels, copied in copies:
            consumer.wait_event(copied)
            # Or its memory would be given to the next copy while it is still read.
            pixels.record_stream(consumer)
            yield pixels


def _copied(
    stacked: Tensor, batches: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
    """Batches on their way to the device, through a ring of page-locked memory, on a stream of their own."""
    largest = max(map(len, batches), default=0)
    slots = torch.empty(SLOTS, largest, *stacked.shape[1:], dtype=stacked.dtype, pin_memory=True)
    stream, copied = torch.cuda.Stream(device), [torch.cuda.Event() for _ in range(SLOTS)]
    images = stacked.numpy()
    for turn, numbers in enumerate(batches):
        slot = slots[turn % SLOTS, : len(numbers)]
        copied[turn % SLOTS].synchronize()
        # numpy copies with this thread alone: torch would wake as many as there are cores, beside those that launch kernels.
        np.take(images, numbers.numpy(), axis=0, out=slot.numpy(), mode="clip")
        with torch.cuda.stream(stream):
            pixels = slot.to(device, non_blocking=True)
            copied[turn % SLOTS].record(stream)
        yield pixels, copied[turn % SLOTS]


def made_ahead(items: Iterator[Item], ahead: int = MADE_AHEAD) -> Generator[Item, None, None]:
    """The same items, so many of them made by a thread while the one before them is used."""
    end = object()
    with ThreadPoolExecutor(1) as maker:
        waiting = deque(maker.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(maker.submit(next, items, end))
            yield cast(Item, item)
