"""Crops of JPEGs that are decoded on the GPU; images that its decoder cannot take are decoded on the CPU, one by one."""

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple

import PIL.Image
import torch
from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data.augment import Augment, crop_and_resize
from stop_mim.data.crops import Box, CropDraws, CropRequest, cut, part_or_next, read_encoded
from stop_mim.data.image_source import EncodedSource, ImageSource
from stop_mim.data.images import BadImage
from stop_mim.data.jpegs import AS_RGB, JpegHeader, as_tensor, has_end, jpeg_header, torchvision_operator
from stop_mim.errors import first_line

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""From files, as bytes on the CPU, to (3, height, width) bytes on the GPU; raises RuntimeError if it fails on one."""

LARGEST_PIXELS = 2**24
"""Images of more pixels are decoded on the CPU, where they are decoded at a part of their size."""

PIXELS_AT_ONCE = 2**24
"""The most pixels that are decoded, or cropped, in one piece: they bound the memory."""

LOOKED_AT = 64
_BATCHES_AHEAD = 3
_READ_AT_ONCE = 32


class DecodedBatch(NamedTuple):
    """The crops of a batch on the device, and what had to be said of bad images."""

    pixels: UInt8[Tensor, "batch 3 height width"]
    bad: list[str]


class GpuCrops:
    """Batches of crops on a device, a few ahead: threads read the files, and one of them has the device decode them."""

    def __init__(
        self,
        source: ImageSource,
        augment: Augment,
        device: torch.device,
        seed: int,
        decoder: Decoder,
        threads: int = 2,
    ) -> None:
        self.source, self.device, self.decoder = source, device, decoder
        self.draws, self.size = CropDraws(augment, seed), augment.size
        self.max_pixels = min(LARGEST_PIXELS, source.max_pixels) if isinstance(source, EncodedSource) else 0
        self.threads = max(1, threads)

    def batches(self, requests: Iterator[CropRequest]) -> Iterator[DecodedBatch]:
        """The batches of requests, in their order, made in the background while the last one is in use."""
        with ExitStack() as stack:
            readers = stack.enter_context(ThreadPoolExecutor(self.threads, "read"))
            maker = stack.enter_context(ThreadPoolExecutor(1, "decode"))
            stack.callback(maker.shutdown, cancel_futures=True)
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            ahead: deque[Future[DecodedBatch]] = deque()
            for request in requests:
                ahead.append(maker.submit(self._make, request, self._read(request, readers), readers, stream))
                if len(ahead) > _BATCHES_AHEAD:
                    yield self._handed_over(ahead.popleft().result())
            while ahead:
                yield self._handed_over(ahead.popleft().result())

    def _read(self, request: CropRequest, readers: ThreadPoolExecutor) -> "list[Future[list[_File]]]":
        starts = range(0, len(request.indices), _READ_AT_ONCE)
        pieces = (request.indices[start : start + _READ_AT_ONCE] for start in starts)
        return [readers.submit(self._read_files, piece) for piece in pieces]

    def _read_files(self, indices: Sequence[int]) -> "list[_File]":
        return [_File(encoded, self._gpu_header(encoded)) for encoded in read_encoded(self.source, indices)]

    def _gpu_header(self, encoded: bytes | None) -> JpegHeader | None:
        # nvJPEG does not notice that the end of a file is missing, and fills the rest of the image with grey.
        if encoded is None or not has_end(encoded):
            return None
        header = jpeg_header(encoded)
        suits = header is not None and header.components == 3 and header.height * header.width <= self.max_pixels
        return header if suits else None

    def _make(
        self,
        request: CropRequest,
        reading: "list[Future[list[_File]]]",
        readers: ThreadPoolExecutor,
        stream: torch.cuda.Stream | None,
    ) -> DecodedBatch:
        files = [file for piece in reading for file in piece.result()]
        if stream is None:
            return self._crops(request, files, readers, lambda: None)
        with torch.cuda.stream(stream):
            batch = self._crops(request, files, readers, stream.synchronize)
            stream.synchronize()
            return batch

    def _crops(
        self, request: CropRequest, files: "list[_File]", readers: ThreadPoolExecutor, wait: Callable[[], None]
    ) -> DecodedBatch:
        boxes = self.draws.boxes(request)
        pixels = torch.empty(len(files), 3, *self.size, dtype=torch.uint8, device=self.device)

        def crop_on_cpu(place: int) -> tuple[Tensor, list[str]]:
            index, encoded = request.indices[place], files[place].encoded
            part, skipped = part_or_next(self.source, index, boxes[place], self.size, encoded)
            return cut(part, self.size), skipped

        on_cpu = {place: readers.submit(crop_on_cpu, place) for place, file in enumerate(files) if file.header is None}
        for piece in _pieces(files):
            # The decoder writes at once, into memory that work of this stream, still waiting, may yet have to read.
            wait()
            decoded = decode_or_none(self.decoder, [as_tensor(files[place].encoded or b"") for place in piece])
            images = {place: image for place, image in zip(piece, decoded, strict=True) if image is not None}
            images = {place: image for place, image in images.items() if _fits(image, files[place])}
            for place in piece:
                if place not in images:
                    on_cpu[place] = readers.submit(crop_on_cpu, place)
            if images:
                chosen = [boxes[place](image.shape[1], image.shape[2]) for place, image in images.items()]
                places = torch.tensor(list(images), device=self.device)
                pixels[places] = crop_each(list(images.values()), chosen, self.size)
        bad: list[str] = []
        for place in sorted(on_cpu):
            crop, skipped = on_cpu[place].result()
            pixels[place] = crop.permute(2, 0, 1).to(self.device)
            bad += skipped
        return DecodedBatch(pixels, bad)

    def _handed_over(self, batch: DecodedBatch) -> DecodedBatch:
        if self.device.type == "cuda":
            # Made on another stream: its memory must not be used again before this one is done with it.
            batch.pixels.record_stream(torch.cuda.current_stream(self.device))
        return batch


class _File(NamedTuple):
    encoded: bytes | None
    header: JpegHeader | None
    """Only of what the GPU may decode."""


def _pieces(files: Sequence[_File]) -> Iterator[list[int]]:
    piece: list[int] = []
    pixels = 0
    for place, file in enumerate(files):
        if file.header is None:
            continue
        area = file.header.height * file.header.width
        if piece and pixels + area > PIXELS_AT_ONCE:
            yield piece
            piece, pixels = [], 0
        piece.append(place)
        pixels += area
    if piece:
        yield piece


def _fits(image: Tensor, file: _File) -> bool:
    header = file.header
    return header is not None and tuple(image.shape) == (3, header.height, header.width)


def decode_or_none(decoder: Decoder, encoded: list[Tensor]) -> list[Tensor | None]:
    """All that the decoder can decode, with None in the places of the others, which are found by halving the list."""
    try:
        return list(decoder(encoded))
    except RuntimeError:
        if len(encoded) == 1:
            return [None]
        half = len(encoded) // 2
        return decode_or_none(decoder, encoded[:half]) + decode_or_none(decoder, encoded[half:])


def crop_each(
    images: Sequence[Tensor], boxes: Sequence[Box], size: tuple[int, int]
) -> UInt8[Tensor, "batch 3 height width"]:
    """Cut a box out of each image, whatever its size, and resize it with antialiasing, on the images' device."""
    crops = torch.empty(len(images), 3, *size, dtype=torch.uint8, device=images[0].device)
    for group in _groups(boxes):
        stacked, inside = _stack([images[place] for place in group], [boxes[place] for place in group])
        resized = crop_and_resize(stacked, inside.to(crops.device), size).round_().clamp_(0, 255)
        crops[torch.tensor(group, device=crops.device)] = resized.to(torch.uint8)
    return crops


def _groups(boxes: Sequence[Box]) -> Iterator[list[int]]:
    by_height = sorted(range(len(boxes)), key=lambda place: (boxes[place].height, boxes[place].width))
    group: list[int] = []
    width = 0
    for place in by_height:
        widest = max(width, boxes[place].width)
        if group and boxes[place].height * widest * (len(group) + 1) > PIXELS_AT_ONCE:
            yield group
            group, widest = [], boxes[place].width
        group.append(place)
        width = widest
    yield group


def _stack(images: Sequence[Tensor], boxes: Sequence[Box]) -> tuple[Tensor, Tensor]:
    if len({image.shape for image in images}) == 1:
        return torch.stack(list(images)), torch.tensor(boxes)
    height, width = max(box.height for box in boxes), max(box.width for box in boxes)
    # Never filled where no crop lies: what is outside of a box has no weight.
    canvas = images[0].new_empty(len(images), 3, height, width)
    for place, (image, box) in enumerate(zip(images, boxes, strict=True)):
        part = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        canvas[place, :, : box.height, : box.width] = part
    return canvas, torch.tensor([(0, 0, box.height, box.width) for box in boxes])


def gpu_decoder(device: torch.device) -> Decoder | None:
    """Torchvision's decoder for this device, nvJPEG, if it is there and works."""
    if device.type != "cuda" or decoder_obstacle(device):
        return None
    return lambda encoded: _decode_with_nvjpeg(encoded, device)


def _decode_with_nvjpeg(encoded: list[Tensor], device: torch.device) -> list[Tensor]:
    operator = torchvision_operator("decode_jpegs_cuda")
    if operator is None:
        raise RuntimeError("torchvision comes without nvJPEG")
    return operator(encoded, AS_RGB, device)


@cache
def decoder_obstacle(device: torch.device) -> str:
    """Why torchvision's decoder does not work on this GPU, in a few words; nothing if it does."""
    colour = (200, 100, 50)
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (32, 16), colour).save(buffer, "JPEG", quality=95)
    try:
        torch.cuda.synchronize(device)
        (pixels,) = _decode_with_nvjpeg([as_tensor(buffer.getvalue())], device)
        difference = pixels.cpu().int() - torch.tensor(colour)[:, None, None]
    except RuntimeError as error:
        return first_line(error)
    right = pixels.shape == (3, 16, 32) and bool((difference.abs() < 8).all())
    return "" if right else "it decodes wrongly"


def are_jpegs(source: ImageSource) -> bool:
    """Whether most images of a source are usual JPEGs, as far as some of them, evenly spread, tell."""
    if not isinstance(source, EncodedSource):
        return False
    looked_at = range(0, len(source), max(1, len(source) // LOOKED_AT))
    return 2 * sum(_is_jpeg(source, index) for index in looked_at) > len(looked_at)


def _is_jpeg(source: EncodedSource, index: int) -> bool:
    try:
        return jpeg_header(source.encoded(index)) is not None
    except BadImage:
        return False
