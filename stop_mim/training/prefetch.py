"""Batches that are made on a GPU while the step before them still runs there."""

from collections.abc import Iterator

import torch
from torch import Tensor

from stop_mim.training.step import Batches


def prefetched(batches: Iterator[Batches], device: torch.device) -> Iterator[Batches]:
    """The same batches; on a GPU made on a stream of their own, so that the steps of others hide what they cost."""
    if device.type != "cuda":
        yield from batches
        return
    aside, consumer = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    aside.wait_stream(consumer)
    while True:
        with torch.cuda.stream(aside):
            made = next(batches, None)
        if made is None:
            return
        consumer.wait_stream(aside)
        for tensor in _tensors(made):
            # Or their memory would be given to the next ones while the step still reads it.
            tensor.record_stream(consumer)
        yield made


def _tensors(batches: Batches) -> Iterator[Tensor]:
    for images, masks in batches:
        yield from (images, masks.context, masks.targets)
