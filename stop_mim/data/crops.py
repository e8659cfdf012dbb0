"""Random crops of streamed images: which part of an image is seen, and how it is cut on the CPU.

The part is a function of (seed, epoch, image), distributed as `sample_crop_boxes` draws it, whoever cuts it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float64, UInt8
from torch import Tensor
from torch.nn import functional

from stop_mim.data.augment import Augment
from stop_mim.data.image_source import EncodedSource, ImageSource
from stop_mim.data.images import BadImage, decode_shrunk_jpeg, decode_with_pillow
from stop_mim.data.jpegs import decode_usual_jpeg, jpeg_header
from stop_mim.data.order import BatchOrder
from stop_mim.errors import InputError
from stop_mim.seeds import derive_seed

# Smaller factors take as long as decoding the whole image, since reading its codes takes most of the time.
SHRINKS = (8, 4)

# Bounds of memory: many files, since they are small; about as many pixels as a cache holds.
_READ_TOGETHER = 32
_PIXELS_CUT_TOGETHER = 2**17
_ATTEMPTS = 10
_CHANCES = 2 * _ATTEMPTS + 2

Found = TypeVar("Found")
Bounds = tuple[float, float]


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


BoxOf = Callable[[int, int], Box]


class CropRequest(NamedTuple):
    """The images of a batch, and the epoch that it belongs to: what is made of it depends on nothing else."""

    epoch: int
    indices: list[int]


class CropRequests:
    """The requests of all batches of an order from the batch `first` on, without an end."""

    def __init__(self, order: BatchOrder, first: int) -> None:
        self.order, self.first = order, first

    def __iter__(self) -> Iterator[CropRequest]:
        batch = self.first
        while True:
            yield CropRequest(self.order.epoch_of(batch), self.order.indices(batch).tolist())
            batch += 1


class Part(NamedTuple):
    """A decoded image, and the box that is to be cut out of it."""

    pixels: UInt8[Tensor, "height width 3"]
    box: Box


class CroppedImages:
    """Makes whole batches of crops on the CPU."""

    def __init__(self, source: ImageSource, augment: Augment, seed: int) -> None:
        self.source, self.draws, self.size = source, CropDraws(augment, seed), augment.size

    def fill(self, crops: UInt8[Tensor, "batch height width 3"], request: CropRequest) -> list[str]:
        """Write the crops of a request, each bad image replaced by the next good one, and tell what is bad."""
        bad: list[str] = []
        decoded: dict[int, Part] = {}
        pixels = 0
        # Reading, decoding and cutting take turns as rarely as the caches allow: image by image, small ones take a
        # third longer.
        for place, (part, skipped) in enumerate(self._parts(request)):
            decoded[place] = part
            bad += skipped
            pixels += part.pixels.shape[0] * part.pixels.shape[1]
            if pixels >= _PIXELS_CUT_TOGETHER:
                _cut_into(crops, decoded)
                pixels = 0
        _cut_into(crops, decoded)
        return bad

    def _parts(self, request: CropRequest) -> Iterator[tuple[Part, list[str]]]:
        boxes = self.draws.boxes(request)
        for start in range(0, len(boxes), _READ_TOGETHER):
            indices = request.indices[start : start + _READ_TOGETHER]
            for place, encoded in enumerate(read_encoded(self.source, indices)):
                yield part_or_next(self.source, indices[place], boxes[start + place], self.size, encoded)


def _cut_into(crops: UInt8[Tensor, "batch height width 3"], decoded: dict[int, Part]) -> None:
    size = (crops.shape[1], crops.shape[2])
    for place, part in decoded.items():
        crops[place] = cut(part, size)
    decoded.clear()


class CropDraws:
    """Draws the crops of an augmentation as a function of the seed, the epoch and the image."""

    def __init__(self, augment: Augment, seed: int) -> None:
        self.scale, self.ratio, self.seed = augment.config.crop_scale, augment.config.crop_ratio, seed

    def boxes(self, request: CropRequest) -> list[BoxOf]:
        """For each image of a request the function from its (height, width) to the crop."""
        chances = crop_chances(self.seed, request.epoch, request.indices).tolist()
        return [self._box_of(row) for row in chances]

    def _box_of(self, chances: list[float]) -> BoxOf:
        return lambda height, width: crop_box(height, width, chances, self.scale, self.ratio)


def crop_chances(seed: int, epoch: int, indices: Sequence[int]) -> Float64[np.ndarray, "images chances"]:
    """Uniform numbers in [0, 1) for each image: its own piece of the SplitMix64 sequence of the seed and the epoch."""
    # As arrays, since NumPy warns where scalars overflow, as they must here.
    start = np.array([derive_seed(seed, "crop", epoch)], dtype=np.uint64)
    places = np.asarray(indices, dtype=np.uint64)[:, None] * np.uint64(_CHANCES) + np.arange(_CHANCES, dtype=np.uint64)
    state: np.ndarray = start + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    mixed = state ^ (state >> np.uint64(31))
    return (mixed >> np.uint64(11)) * 2.0**-53


def crop_box(height: int, width: int, chances: Sequence[float], scale: Bounds, ratio: Bounds) -> Box:
    """The crop that these uniform numbers choose, as `sample_crop_boxes` would from the same ones."""
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * chances[2 * attempt])
        aspect = math.exp(log_low + (log_high - log_low) * chances[2 * attempt + 1])
        crop_height, crop_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 1 <= crop_height <= height and 1 <= crop_width <= width:
            top = int(chances[-2] * (height - crop_height + 1))
            left = int(chances[-1] * (width - crop_width + 1))
            # A product may round up to the bound itself, which would put the crop one pixel outside.
            return Box(min(top, height - crop_height), min(left, width - crop_width), crop_height, crop_width)
    crop_height, crop_width = min(height, max(1, round(width / ratio[0]))), min(width, max(1, round(height * ratio[1])))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def read_encoded(source: ImageSource, indices: Sequence[int]) -> list[bytes | None]:
    """The images as they are stored; None for what is not stored as a file or cannot be read."""
    return [_encoded_or_none(source, index) for index in indices]


def _encoded_or_none(source: ImageSource, index: int) -> bytes | None:
    try:
        return source.encoded(index) if isinstance(source, EncodedSource) else None
    except BadImage:
        return None


def part_or_next(
    source: ImageSource, index: int, box_of: BoxOf, size: tuple[int, int], encoded: bytes | None = None
) -> tuple[Part, list[str]]:
    """The part of an image, or of the first good one after it with the descriptions of the bad ones in between.

    `encoded` is the image itself, where it has been read already.
    """
    return first_good(source, index, lambda at: read_part(source, at, box_of, size, encoded if at == index else None))


def first_good(source: ImageSource, index: int, read: Callable[[int], Found]) -> tuple[Found, list[str]]:
    """What `read` makes of the image, or of the first good one after it; and what is bad in between."""
    bad: list[str] = []
    for offset in range(len(source)):
        try:
            return read((index + offset) % len(source)), bad
        except BadImage as error:
            bad.append(str(error))
    raise InputError(f"None of the {len(source)} images of '{source.name}' can be read: check the data.")


def read_part(
    source: ImageSource, index: int, box_of: BoxOf, size: tuple[int, int], encoded: bytes | None = None
) -> Part:
    """The part of an image that will be resized to `size`; raises BadImage."""
    if isinstance(source, EncodedSource):
        encoded = source.encoded(index) if encoded is None else encoded
        return decode_part(encoded, source.describe(index), box_of, size, source.max_pixels)
    return _part(source.read(index).permute(1, 2, 0), box_of)


def decode_part(encoded: bytes, name: str, box_of: BoxOf, size: tuple[int, int], max_pixels: int) -> Part:
    """The part of an encoded image that will be resized to `size`; raises BadImage.

    A JPEG whose crop is at least four times (eight times) as large as `size` both ways is decoded at a quarter (an
    eighth) of its size, which is quicker. It is shrunk by libjpeg then and resized with antialiasing from there: details
    near the finest that `size` can show differ a little, and the crop is rounded to the pixels of the shrunken image.
    """
    header = jpeg_header(encoded)
    if header is not None and header.height * header.width <= max_pixels:
        box = box_of(header.height, header.width)
        for shrink in SHRINKS:
            if box.height >= shrink * size[0] and box.width >= shrink * size[1]:
                pixels = decode_shrunk_jpeg(encoded, name, shrink)
                return Part(pixels, _scaled(box, pixels.shape[0] / header.height, pixels.shape[1] / header.width))
        quick = decode_usual_jpeg(encoded)
        if quick is not None:
            return Part(quick, box)
    return _part(decode_with_pillow(encoded, name, max_pixels), box_of)


def _part(pixels: UInt8[Tensor, "height width 3"], box_of: BoxOf) -> Part:
    return Part(pixels, box_of(pixels.shape[0], pixels.shape[1]))


def _scaled(box: Box, rows: float, columns: float) -> Box:
    top, left = round(box.top * rows), round(box.left * columns)
    bottom, right = round((box.top + box.height) * rows), round((box.left + box.width) * columns)
    return Box(top, left, bottom - top, right - left)


def cut(part: Part, size: tuple[int, int]) -> UInt8[Tensor, "height width 3"]:
    """Cut the box, which must lie inside the image, and resize it with antialiased bilinear interpolation."""
    box = part.box
    # A batch of one in channels-last layout: the resizing of bytes works pixel by pixel, and is quickest there.
    images = part.pixels.contiguous()[None].permute(0, 3, 1, 2)
    inside = images[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return functional.interpolate(inside, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
