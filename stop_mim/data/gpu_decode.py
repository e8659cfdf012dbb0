"""JPEGs decoded on the GPU by torchvision's nvJPEG and cut there; other images are decoded and cut on the CPU."""

import io
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cache, partial
from itertools import starmap

import PIL.Image
import torch
from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data.augment import Interpolation, TestView, View, crop_and_resize
from stop_mim.data.decode import (
    AS_RGB,
    BadImage,
    Box,
    OpenedImage,
    as_tensor,
    has_end,
    jpeg_header,
    torchvision_operator,
)
from stop_mim.data.image_source import ImageSource
from stop_mim.data.lookahead import prefetched, taken_ahead
from stop_mim.data.order import Request
from stop_mim.data.streamed import READ_TOGETHER, Bad, ImageCutter, ReadImages, as_read
from stop_mim.errors import InputError, first_line
from stop_mim.options import Decode

ENOUGH_WORKERS = 7
"""This many workers decode photographs faster than a GPU that is training a ViT-B/16; see docs/results/performance.md."""
JPEGS_LOOKED_AT = 64
PIXELS_AT_ONCE = 2**24
"""The most pixels that are decoded, or cut, at once: this bounds the memory. Images with more are decoded on the CPU."""
_BATCHES_AHEAD = 3
_CUT_TOGETHER = READ_TOGETHER // 4

GpuDecoder = Callable[[list[Tensor]], list[Tensor]]
"""From encoded images (bytes on the CPU) to (3, height, width) bytes on the GPU; raises RuntimeError if one fails."""


def find_gpu_decoder(
    source: ImageSource, view: View, device: torch.device, wanted: Decode, workers: int
) -> tuple[GpuDecoder | None, str]:
    """Return the decoder for the JPEGs of a source on the GPU; if there is none, None and the reason."""
    enough = wanted == "auto" and workers >= ENOUGH_WORKERS
    if wanted == "cpu" or enough or isinstance(view, TestView) or view.retouch is not None:
        return None, ""
    if device.type != "cuda":
        obstacle = f"the device is {device}"
    elif not are_jpegs(source):
        obstacle = f"the images of '{source.name}' are not stored as JPEGs"
    elif reason := gpu_obstacle(device):
        obstacle = f"torchvision's decoder does not work there: {reason}"
    else:
        return partial(decode_with_nvjpeg, device=device), ""
    if wanted == "gpu":
        raise InputError(f"speed.decode is gpu, but {obstacle}: choose auto or cpu.")
    return None, obstacle if device.type == "cuda" else ""


def are_jpegs(source: ImageSource) -> bool:
    """Whether most images of a source are usual JPEGs, judged by about 64 of them."""
    near = len(source) if source.blocks is None else int(source.blocks[0])
    looked_at = range(0, near, max(1, near // JPEGS_LOOKED_AT))
    found = 0
    for index in looked_at:
        with suppress(BadImage):
            found += jpeg_header(source.encoded(index) or b"") is not None
    return 2 * found > len(looked_at)


class GpuDecoded:
    """Images that threads read and the device decodes and cuts."""

    def __init__(self, cutter: ImageCutter, device: torch.device, threads: int, decoder: GpuDecoder) -> None:
        self.cutter, self.device, self.threads, self.decoder = cutter, device, max(1, threads), decoder
        images = f"{len(cutter.source):,} images"
        self.description = f"streaming: {images}, decoded on {device}, read by {self.threads} threads"

    def read(self, requests: Iterator[Request]) -> Generator[ReadImages, None, None]:
        """Yield the images of each request, decoded ahead of use."""
        with (
            ThreadPoolExecutor(self.threads, "read") as readers,
            closing(prefetched(self._made(requests, readers), self.device, _BATCHES_AHEAD)) as made,
        ):
            yield from made

    def _made(self, requests: Iterator[Request], readers: ThreadPoolExecutor) -> Generator[ReadImages, None, None]:
        def start(request: Request) -> tuple[Request, list[Future[list[OpenedImage | None]]]]:
            groups = request.indices.split(READ_TOGETHER)
            return request, [readers.submit(self._open, group.tolist()) for group in groups]

        started = taken_ahead(map(start, requests), _BATCHES_AHEAD)
        yield from starmap(partial(self._make, readers=readers), started)

    def _open(self, indices: list[int]) -> list[OpenedImage | None]:
        """Read images; None where the device cannot decode one."""
        source, found = self.cutter.source, list[OpenedImage | None]()
        for index in indices:
            opened = None
            with suppress(BadImage):
                opened = OpenedImage.of_jpeg(source.encoded(index) or b"", source.describe(index))
            found.append(opened if opened is not None and suits_gpu(opened) else None)
        return found

    def _make(
        self, request: Request, opening: list[Future[list[OpenedImage | None]]], readers: ThreadPoolExecutor
    ) -> ReadImages:
        opened = [image for group in opening for image in group.result()]
        pixels = torch.empty(len(opened), 3, *self.cutter.view.size, dtype=torch.uint8, device=self.device)
        # The threads cut what the GPU cannot decode while it decodes the rest.
        cutting = self._begin_on_cpu(request, [place for place, image in enumerate(opened) if image is None], readers)
        done = self._cut_on_gpu(request, opened, pixels)
        failed = [place for place, image in enumerate(opened) if image is not None and place not in done]
        bad: list[Bad] = []
        for group, crops, filled in [*cutting, *self._begin_on_cpu(request, failed, readers)]:
            bad += [(group[at], description) for at, description in filled.result()]
            pixels[torch.tensor(group, device=self.device)] = crops.permute(0, 3, 1, 2).to(self.device)
        return as_read(request, pixels, bad, self.cutter.replace_bad, self.device)

    def _cut_on_gpu(self, request: Request, opened: Sequence[OpenedImage | None], pixels: Tensor) -> set[int]:
        """Decode and cut images into their places; return the places, without those of failures."""
        images = {place: image for place, image in enumerate(opened) if image is not None}
        boxes = self.cutter.boxes(request.epoch, request.indices.tolist(), images)
        places, view, done = list(images), self.cutter.view, set[int]()
        for group in bounded_groups([image.size for image in images.values()]):
            if self.device.type == "cuda":
                # The decoder writes at once, into memory that earlier work of this stream may still have to read.
                torch.cuda.current_stream(self.device).synchronize()
            decoded = decode_on_gpu(self.decoder, [images[places[at]] for at in group])
            good = {places[at]: image for at, image in zip(group, decoded, strict=True) if image is not None}
            if good:
                inside = [boxes[place] for place in good]
                crops = cut_each(list(good.values()), inside, view.size, view.interpolation)
                pixels[torch.tensor(list(good), device=self.device)] = crops
                done |= good.keys()
        return done

    def _begin_on_cpu(
        self, request: Request, places: list[int], readers: ThreadPoolExecutor
    ) -> list[tuple[list[int], Tensor, Future[list[Bad]]]]:
        """Begin to read, decode and cut images in threads; return groups of places, their crops, and their bad images."""
        jobs = []
        for group in (places[start : start + _CUT_TOGETHER] for start in range(0, len(places), _CUT_TOGETHER)):
            crops = torch.empty(len(group), *self.cutter.view.size, 3, dtype=torch.uint8)
            indices = request.indices[group].tolist()
            jobs.append((group, crops, readers.submit(self.cutter.fill, crops, request.epoch, indices)))
        return jobs


def suits_gpu(image: OpenedImage) -> bool:
    """Whether nvJPEG may decode an image: in colour, not too large, and complete (missing parts would become grey)."""
    height, width = image.size
    return image.components == 3 and height * width <= PIXELS_AT_ONCE and has_end(image.encoded)


def decode_with_nvjpeg(encoded: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEGs (bytes on the CPU) to (3, height, width) bytes on the GPU; raises RuntimeError if one fails."""
    operator = torchvision_operator("decode_jpegs_cuda")
    if operator is None:
        raise RuntimeError("torchvision comes without nvJPEG")
    return operator(encoded, AS_RGB, device)


@cache
def gpu_obstacle(device: torch.device) -> str:
    """Return why torchvision's decoder does not work on this GPU, in a few words; "" if it does."""
    colour = (200, 100, 50)
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (32, 16), colour).save(buffer, "JPEG", quality=95)
    try:
        torch.cuda.synchronize(device)
        (pixels,) = decode_with_nvjpeg([as_tensor(buffer.getvalue())], device)
        difference = pixels.cpu().int() - torch.tensor(colour)[:, None, None]
    except RuntimeError as error:
        return first_line(error)
    right = pixels.shape == (3, 16, 32) and bool((difference.abs() < 8).all())
    return "" if right else "it decodes wrongly"


def decode_on_gpu(decoder: GpuDecoder, images: Sequence[OpenedImage]) -> list[Tensor | None]:
    """Decode JPEGs; None for each failure. Failures are found by halving the list."""
    try:
        decoded = decoder([as_tensor(image.encoded) for image in images])
    except RuntimeError:
        if len(images) == 1:
            return [None]
        half = len(images) // 2
        return decode_on_gpu(decoder, images[:half]) + decode_on_gpu(decoder, images[half:])
    pairs = zip(decoded, images, strict=True)
    return [pixels if tuple(pixels.shape) == (3, *image.size) else None for pixels, image in pairs]


def bounded_groups(areas: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Split images of these (height, width) into groups that fit PIXELS_AT_ONCE when padded to one size."""
    group: list[int] = []
    height = width = 0
    for place in sorted(range(len(areas)), key=lambda place: areas[place]):
        taller, wider = max(height, areas[place][0]), max(width, areas[place][1])
        if group and taller * wider * (len(group) + 1) > PIXELS_AT_ONCE:
            yield group
            group, (taller, wider) = [], areas[place]
        group.append(place)
        height, width = taller, wider
    if group:
        yield group


def cut_each(
    images: Sequence[Tensor], boxes: Sequence[Box], size: tuple[int, int], interpolation: Interpolation = "bilinear"
) -> UInt8[Tensor, "batch 3 height width"]:
    """Cut a box out of each image and resize it with antialiasing, on the images' device; image sizes may differ."""
    crops = torch.empty(len(images), 3, *size, dtype=torch.uint8, device=images[0].device)
    for group in bounded_groups([(box[2], box[3]) for box in boxes]):
        stacked, inside = _stack([images[place] for place in group], [boxes[place] for place in group])
        resized = crop_and_resize(stacked, inside.to(crops.device), size, None, interpolation).round_().clamp_(0, 255)
        crops[torch.tensor(group, device=crops.device)] = resized.to(torch.uint8)
    return crops


def _stack(images: Sequence[Tensor], boxes: Sequence[Box]) -> tuple[Tensor, Tensor]:
    if len({image.shape for image in images}) == 1:
        return torch.stack(list(images)), torch.tensor(boxes)
    height, width = max(box[2] for box in boxes), max(box[3] for box in boxes)
    # Pixels outside a box have no weight and stay uninitialised.
    canvas = images[0].new_empty(len(images), 3, height, width)
    for place, (image, (top, left, tall, wide)) in enumerate(zip(images, boxes, strict=True)):
        canvas[place, :, :tall, :wide] = image[:, top : top + tall, left : left + wide]
    return canvas, torch.tensor([(0, 0, box[2], box[3]) for box in boxes])
