"""Images that worker processes read, decode and cut on demand."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from stop_mim.data.augment import TestView, View, draw
from stop_mim.data.decode import BadImage, Box, OpenedImage, cut
from stop_mim.data.image_source import ImageSource, first_good
from stop_mim.data.lookahead import Slots, mapped
from stop_mim.data.order import Request
from stop_mim.seeds import derive_seed

# Workers get pieces of this many images, so that all of them share a large batch.
PIECE = 64
PIECES_AHEAD = 4
# Bounds of memory: the most files read, and pixels decoded, before the next stage runs.
READ_TOGETHER, _CUT_TOGETHER = 32, 2**17

Bad = tuple[int, str]
"""The place of a bad image, and its description."""


class ReadImages(NamedTuple):
    """The images of a request as bytes on the device, whole or cut; bad ones may be left out."""

    epoch: int
    indices: Int[Tensor, " batch"]
    pixels: UInt8[Tensor, "batch 3 height width"]
    on_device: Int[Tensor, " batch"]
    """The indices on the device."""
    bad: Sequence[str] = ()
    """The descriptions of bad images."""


def as_read(
    request: Request,
    pixels: UInt8[Tensor, "batch 3 height width"],
    bad: list[Bad],
    replace_bad: bool,
    device: torch.device,
) -> ReadImages:
    """Return the images of a request; bad ones are left out unless they are replaced."""
    indices = request.indices
    if bad and not replace_bad:
        good = torch.ones(len(indices), dtype=torch.bool)
        good[[place for place, _ in bad]] = False
        indices, pixels = indices[good], pixels[good.to(device)]
    descriptions = [description for _, description in bad]
    on_device = indices.to(device, non_blocking=True)
    return ReadImages(request.epoch, indices, pixels.contiguous(), on_device, descriptions)


@dataclass(frozen=True, eq=False)
class ImageCutter:
    """Reads, decodes and cuts images on the CPU; can be pickled."""

    source: ImageSource
    view: View
    seed: int
    replace_bad: bool

    def fill(self, crops: UInt8[Tensor, "n height width 3"], epoch: int, indices: Sequence[int]) -> list[Bad]:
        """Write the crop of each image; return the bad images by their place."""
        bad: list[Bad] = []
        for start in range(0, len(indices), READ_TOGETHER):
            group = indices[start : start + READ_TOGETHER]
            found = self._fill_group(crops[start : start + len(group)], epoch, group)
            bad += [(start + place, description) for place, description in found]
        return bad

    def _fill_group(self, crops: Tensor, epoch: int, indices: Sequence[int]) -> list[Bad]:
        bad: list[Bad] = []
        opened: dict[int, OpenedImage] = {}
        for place, index in enumerate(indices):
            try:
                opened[place] = self.source.open(index)
            except BadImage as error:
                bad.append((place, str(error)))
        bad += self._decode_and_cut(crops, opened, self.boxes(epoch, indices, opened))
        if bad and self.replace_bad:
            others: dict[int, OpenedImage] = {}
            for place in dict(bad):
                others[place], also_bad = first_good(self.source, (indices[place] + 1) % len(self.source))
                bad += [(place, description) for description in also_bad]
            self._decode_and_cut(crops, others, self.boxes(epoch, indices, others))
        if self.view.retouch is not None:
            for place, index in enumerate(indices):
                crops[place] = self.view.retouch(crops[place], derive_seed(self.seed, "retouch", epoch, index))
        return bad

    def _decode_and_cut(self, crops: Tensor, opened: Mapping[int, OpenedImage], boxes: Mapping[int, Box]) -> list[Bad]:
        whole, bad = isinstance(self.view, TestView), list[Bad]()
        decoded: dict[int, tuple[Tensor, Box]] = {}
        pixels = 0
        # As many images as fit the CPU's caches are decoded, then cut: one by one, small images take a third longer.
        for place, image in opened.items():
            try:
                found = (image.decode(), boxes[place]) if whole else image.decode_part(boxes[place], self.view.size)
            except BadImage as error:
                bad.append((place, str(error)))
                continue
            decoded[place] = found
            pixels += found[0].shape[0] * found[0].shape[1]
            if pixels >= _CUT_TOGETHER:
                self._cut(crops, decoded)
                decoded, pixels = {}, 0
        self._cut(crops, decoded)
        return bad

    def boxes(self, epoch: int, indices: Sequence[int], opened: Mapping[int, OpenedImage]) -> dict[int, Box]:
        """Return the part that the view shows of each image, by its place in `indices`."""
        if isinstance(self.view, TestView) or not opened:
            return {place: (0, 0, *image.size) for place, image in opened.items()}
        draws = draw(self.seed, epoch, torch.tensor([indices[place] for place in opened]))
        boxes = self.view.boxes(torch.tensor([image.size for image in opened.values()]), draws).tolist()
        return {place: (box[0], box[1], box[2], box[3]) for place, box in zip(opened, boxes, strict=True)}

    def _cut(self, crops: Tensor, decoded: Mapping[int, tuple[Tensor, Box]]) -> None:
        for place, (pixels, box) in decoded.items():
            if isinstance(self.view, TestView):
                crops[place] = self.view.cut(pixels.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
            else:
                crops[place] = cut(pixels, box, self.view.size, self.view.interpolation)


def _fill_slot(
    cutter: ImageCutter, pixels: UInt8[Tensor, "slots piece height width 3"], request: tuple[int, int, list[int]]
) -> tuple[int, list[Bad]]:
    """Fill a slot in a worker; only the slot's number and the bad images are sent between processes."""
    slot, epoch, indices = request
    return slot, cutter.fill(pixels[slot, : len(indices)], epoch, indices)


class Streamed:
    """Images that worker processes read, decode and cut on demand."""

    def __init__(
        self, cutter: ImageCutter, device: torch.device, workers: int, batch_size: int, n_images: int, obstacle: str
    ) -> None:
        self.cutter, self.device, self.workers, self.batch_size = cutter, device, workers, batch_size
        self.description = f"streaming: {n_images:,} images, decoded by {workers or 'no'} workers"
        self.description += f" (not on the GPU: {obstacle})" if obstacle else ""

    def read(self, requests: Iterator[Request]) -> Generator[ReadImages, None, None]:
        piece = min(PIECE, self.batch_size)
        ahead = max(PIECES_AHEAD * self.workers, 2 * -(-self.batch_size // piece)) if self.workers else 0
        taken: deque[Request] = deque()
        shape = (piece, *self.cutter.view.size, 3)
        with closing(Slots(ahead + 2, shape, self.device, shared=self.workers > 0)) as slots:

            def pieces() -> Iterator[tuple[int, int, list[int]]]:
                numbers = count()
                for request in requests:
                    taken.append(request)
                    for part in request.indices.split(piece):
                        yield slots.next(next(numbers)), request.epoch, part.tolist()

            work = partial(_fill_slot, self.cutter, slots.pixels)
            with closing(mapped(work, pieces(), self.workers, ahead)) as filled:
                for first in filled:
                    request, bad = taken.popleft(), list[Bad]()
                    pixels = torch.empty(len(request.indices), *shape[1:], dtype=torch.uint8, device=self.device)
                    for start in range(0, len(pixels), piece):
                        slot, found = next(filled) if start else first
                        slots.copy(slot, pixels[start : start + piece])
                        bad += [(start + place, description) for place, description in found]
                    yield as_read(request, pixels.permute(0, 3, 1, 2), bad, self.cutter.replace_bad, self.device)
