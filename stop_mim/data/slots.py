"""Batches in memory that workers share with the main process, filled over and over.

A new piece of shared memory for every batch costs a worker as much as it takes to resize the images.
"""

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from stop_mim.data.crops import CroppedImages, CropRequest, CropRequests


class SlotRequest(NamedTuple):
    """A batch of crops, and the slot that it is to be put into."""

    slot: int
    request: CropRequest


class BatchSlots:
    """A ring of batches of bytes, which the workers fill and this process reads."""

    def __init__(self, count: int, batch_size: int, size: tuple[int, int], device: torch.device, shared: bool) -> None:
        pixels = torch.empty(count, batch_size, *size, 3, dtype=torch.uint8)
        self.pixels = pixels.share_memory_() if shared else pixels
        self.device = device
        self._locked = False
        self._copied: list[torch.cuda.Event | None] = [None] * count

    def __enter__(self) -> "BatchSlots":
        if self.device.type == "cuda":
            # Page-locked memory is copied to the GPU in the background; where that is refused, the copy only takes longer.
            refusal = torch.cuda.cudart().cudaHostRegister(self.pixels.data_ptr(), self.pixels.numel(), 0)
            self._locked = int(refusal) == 0
            if not self._locked:
                # CUDA keeps the error for whoever asks next, and a kernel's launch would report it as its own.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._locked:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.pixels.data_ptr())

    def read(self, slot: int) -> UInt8[Tensor, "batch 3 height width"]:
        """A copy of a slot on the device."""
        moved = self.pixels[slot].to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
            self._copied[slot] = copied
        # On the CPU nothing was moved, and this is what copies: three channels never lie in memory as both ask for.
        return moved.permute(0, 3, 1, 2).contiguous()

    def wait(self, slot: int) -> None:
        """Wait until a slot that was read may be filled again."""
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()

    def __len__(self) -> int:
        return len(self.pixels)


class SlotRequests:
    """Gives each request the next slot of a ring; the ring must have two slots more than requests are made ahead."""

    def __init__(self, requests: CropRequests, slots: BatchSlots) -> None:
        self.requests, self.slots = requests, slots

    def __iter__(self) -> Iterator[SlotRequest]:
        for number, request in enumerate(self.requests):
            slot = number % len(self.slots)
            self.slots.wait(slot)
            yield SlotRequest(slot, request)


class FilledSlots(Dataset[tuple[int, list[str]]]):
    """Fills the slots that are asked for; what travels between the processes is the slot and the bad images."""

    def __init__(self, images: CroppedImages, pixels: UInt8[Tensor, "slots batch height width 3"]) -> None:
        self.images, self.pixels = images, pixels

    def __getitem__(self, asked: SlotRequest) -> tuple[int, list[str]]:
        """The slot, once it is filled, and the descriptions of bad images."""
        return asked.slot, self.images.fill(self.pixels[asked.slot], asked.request)
