"""`Batches`: the only way images reach a device, for training, probes, features and scores.

A source holds the images, an order selects the images of each batch, a view crops and augments them, and a placement says
where they are kept and decoded: resident in memory (stored.py), streamed by worker processes (streamed.py), or streamed and
decoded on the GPU (gpu_decode.py).
"""

import math
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.data.augment import TestView, View, draw
from stop_mim.data.gpu_decode import GpuDecoded, find_gpu_decoder
from stop_mim.data.image_source import BadImages, ImageSource, common_size
from stop_mim.data.lookahead import fetched
from stop_mim.data.order import Order, Request
from stop_mim.data.stored import MixedSizes, Progress, Resident, is_cacheable, mixed_sizes, store_images
from stop_mim.data.streamed import ImageCutter, Streamed
from stop_mim.options import Decode, LoaderMode

RESIDENT_PART_OF_GPU, RESIDENT_PART_OF_HOST = 0.4, 0.25
MEMINFO = Path("/proc/meminfo")
# Of a container, by cgroups v2; what other processes there use is not subtracted.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Batch(NamedTuple):
    """Normalised images and their labels, if any, on the device, and the positions of the images in the source."""

    images: Float[Tensor, "batch 3 height width"]
    labels: Int[Tensor, " batch"] | None
    indices: Int[Tensor, " batch"]


@dataclass(frozen=True)
class Placement:
    """Where images are kept and decoded."""

    mode: LoaderMode = "auto"
    """resident: images of one size, decoded once into memory; streaming: decoded at every use; auto: resident if they fit."""
    decode: Decode = "auto"
    """Where streamed JPEGs are decoded. CPU and GPU show the same crops; pixels differ by the rounding of the decoders."""
    workers: int = 2
    processes_on_host: int = 1
    stored_view: TestView | None = None
    """Resizes resident images before they are stored, unless all of them have one size, with no more pixels than this view."""


class Batches:
    """Batches of a source on a device; iteration can start at any batch.

    All random draws of a view are a function of (seed, epoch, image). An image that cannot be read is left out of its
    batch; with `replace_bad` the next good image takes its place.

    Args:
        labels: a label for each image of the source.
        bad_images: counts bad images and raises InputError if there are too many.
        progress: shows the progress of decoding resident images, which happens in the constructor.
    """

    def __init__(
        self,
        source: ImageSource,
        order: Order,
        view: View,
        placement: Placement,
        device: torch.device,
        seed: int = 0,
        labels: Int[np.ndarray, " n"] | None = None,
        bad_images: BadImages | None = None,
        progress: Progress | None = None,
        replace_bad: bool = False,
    ) -> None:
        self.source, self.order, self.view, self.device, self.seed = source, order, view, device, seed
        self.bad_images = BadImages(source.name, len(order.images)) if bad_images is None else bad_images
        self.n_images = len(order.images)
        self._labels = None if labels is None else torch.from_numpy(np.asarray(labels, np.int64)).to(device)
        resident = self._resident(placement, progress, replace_bad)
        self._reader = resident or self._streaming(placement, replace_bad)
        self.description = self._reader.description
        self.choices = {
            "loader": "resident" if isinstance(self._reader, Resident) else "streaming",
            "decode": "gpu" if isinstance(self._reader, GpuDecoded) else "cpu",
        }

    def starting_at(self, batch: int = 0) -> Generator[Batch, None, None]:
        """Yield batches, starting with this number; close the generator to stop its workers early."""
        numbers = count(batch) if self.order.length is None else range(batch, self.order.length)
        requests = (Request(self.order.epoch_of(number), self.order.indices(number)) for number in numbers)
        if self.source.blocks is not None and not isinstance(self._reader, Resident):
            requests = fetched(requests, self.source.fetch, self.source.blocks)
        show = self.view.of_whole if isinstance(self._reader, Resident) else self.view.of_cut
        with closing(self._reader.read(requests)) as found:
            for epoch, indices, pixels, on_device, bad in found:
                for description in bad:
                    self.bad_images.add(description)
                labels = None if self._labels is None else self._labels[on_device]
                # Not kept in a variable, which would hold the images while the next batch is read.
                yield Batch(show(pixels, draw(self.seed, epoch, on_device)), labels, indices)

    def _resident(self, placement: Placement, progress: Progress | None, replace_bad: bool) -> Resident | None:
        """Decode all images into memory; return None if they are streamed instead."""
        if placement.mode == "streaming" or self.view.retouch is not None:
            return None
        images, resized = self.order.images, placement.stored_view
        size, view = common_size(self.source, images), None
        if resized is not None and (size is None or math.prod(size) > math.prod(resized.size)):
            size, view = resized.size, resized
        if placement.mode == "auto" and not self._fits(placement, size):
            return None
        if size is None:
            raise mixed_sizes(self.source.name)
        store = partial(store_images, self.source, np.unique(images), workers=placement.workers, progress=progress)
        try:
            stored = store(size, view=view)
        except MixedSizes:
            # `common_size` looks at some of the images only.
            if resized is not None:
                stored = store(resized.size, view=resized)
            elif placement.mode == "resident":
                raise
            else:
                return None
        for index in np.intersect1d(list(stored.bad), images).tolist():
            self.bad_images.add(stored.bad[index])
        budget = resident_budget(self.device, placement.processes_on_host) if self.order.length is None else 0
        return Resident(self.source, stored, images, self.device, self.order.batch_size, budget, replace_bad)

    def _fits(self, placement: Placement, size: tuple[int, int] | None) -> bool:
        """Whether images of this size fit into memory.

        For a single pass, images are kept only if they are already in memory or belong in the cache of decoded images.
        """
        if size is None:
            return False
        is_ready = self.source.stacked() is not None or is_cacheable(self.source, self.order.images, size)
        if self.order.length is not None:
            return is_ready
        budget = resident_budget(self.device, placement.processes_on_host)
        if not is_ready:
            # On a GPU too, every process decodes them in the memory of the host first.
            budget = min(budget, resident_budget(torch.device("cpu"), placement.processes_on_host))
        return 3 * self.n_images * size[0] * size[1] <= budget

    def _streaming(self, placement: Placement, replace_bad: bool) -> Streamed | GpuDecoded:
        cutter, workers = ImageCutter(self.source, self.view, self.seed, replace_bad), placement.workers
        decoder, obstacle = find_gpu_decoder(self.source, self.view, self.device, placement.decode, workers)
        if decoder is not None:
            return GpuDecoded(cutter, self.device, workers, decoder)
        return Streamed(cutter, self.device, workers, self.order.batch_size, self.n_images, obstacle)


def resident_budget(device: torch.device, processes_on_host: int = 1) -> int:
    """Return how many bytes of images may stay in the memory of this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * RESIDENT_PART_OF_GPU)
    return int(available_memory() * RESIDENT_PART_OF_HOST / processes_on_host)


def available_memory() -> int:
    """Return the bytes of memory that are free or only cache files; where the system does not tell, as on macOS, all bytes."""
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else "max"
    text = MEMINFO.read_text() if MEMINFO.exists() else ""
    if "MemAvailable:" in text:
        available = 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available if limit == "max" else min(available, int(limit))
