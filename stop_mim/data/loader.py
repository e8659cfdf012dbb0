"""Augmented batches on the training device, from any batch on: resident in its memory, or streamed by workers."""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader

from stop_mim.data.augment import Augment
from stop_mim.data.bad_images import BadImages
from stop_mim.data.crops import CroppedImages, CropRequests, first_good
from stop_mim.data.decoded import DecodedImages, Progress, decode_in_pieces, decoded_images, ignore_signals
from stop_mim.data.gpu_decode import Decoder, GpuCrops, are_jpegs, decoder_obstacle, gpu_decoder
from stop_mim.data.image_source import ImageSource
from stop_mim.data.images import BadImage
from stop_mim.data.order import BatchOrder
from stop_mim.data.slots import BatchSlots, FilledSlots, SlotRequests
from stop_mim.errors import InputError
from stop_mim.seeds import seeded_generator

LoaderMode = Literal["auto", "resident", "streaming"]
Decode = Literal["auto", "cpu", "gpu"]

# Images of different sizes are stored this much larger than they are used, as 256 is to 224.
STORED_TO_USED = 8 / 7
SIZES_LOOKED_AT = 256
BATCHES_AHEAD = 4
ENOUGH_WORKERS = 7
"""So many decode photographs faster than a GPU does that trains a ViT-B/16 beside; docs/performance.md has the numbers."""
RESIDENT_PART_OF_GPU, RESIDENT_PART_OF_HOST = 0.4, 0.25


@runtime_checkable
class Loader(Protocol):
    """Batches of augmented, normalised images on the training device."""

    n_images: int
    description: str

    def batches(self, order: BatchOrder, first: int) -> Generator[Float[Tensor, "batch 3 height width"], None, None]:
        """Endless batches, beginning with the one of number `first`."""
        ...


@dataclass(frozen=True)
class StoredImages:
    """Decoded images of one size, and the sizes that they had if those were different."""

    pixels: UInt8[Tensor, "n 3 height width"]
    original_sizes: Int[Tensor, "n 2"] | None
    from_cache: bool = False


class ResidentLoader:
    """All images decoded once, as bytes in the device's memory; batches are indexed and augmented there."""

    def __init__(self, stored: StoredImages, augment: Augment, device: torch.device, seed: int, rank: int = 0) -> None:
        self.pixels = stored.pixels.to(device)
        self.original_sizes = None if stored.original_sizes is None else stored.original_sizes.to(device)
        self.augment, self.device, self.seed, self.rank = augment, device, seed, rank
        self.n_images = len(self.pixels)
        height, width = self.pixels.shape[-2:]
        size = self.pixels.numel() / 2**30
        origin = ", from the cache of decoded images" if stored.from_cache else ""
        self.description = f"resident: {self.n_images:,} images of {height}x{width}, {size:.2f} GiB on {device}{origin}"

    def batches(self, order: BatchOrder, first: int) -> Generator[Float[Tensor, "batch 3 height width"], None, None]:
        """Endless batches, beginning with the one of number `first`."""
        batch = first
        while True:
            indices = order.indices(batch).to(self.device, non_blocking=True)
            generator = seeded_generator(self.device, self.seed, "augment", batch, self.rank)
            sizes = None if self.original_sizes is None else self.original_sizes[indices]
            yield self.augment(self.pixels[indices], generator, sizes)
            batch += 1


class StreamingLoader:
    """Images decoded and cropped by worker processes as they are needed; the rest of the augmentation on the device."""

    def __init__(
        self,
        source: ImageSource,
        augment: Augment,
        device: torch.device,
        bad_images: BadImages,
        seed: int,
        rank: int = 0,
        workers: int = 2,
    ) -> None:
        self.source, self.augment, self.device, self.bad_images = source, augment, device, bad_images
        self.seed, self.rank, self.workers = seed, rank, workers
        self.n_images = len(source)
        self.description = f"streaming: {self.n_images:,} images, decoded by {workers or 'no'} workers"

    def batches(self, order: BatchOrder, first: int) -> Generator[Float[Tensor, "batch 3 height width"], None, None]:
        """Endless batches, beginning with the one of number `first`."""
        for batch, pixels in enumerate(self.crops(order, first), start=first):
            generator = seeded_generator(self.device, self.seed, "augment", batch, self.rank)
            yield self.augment.without_crop(pixels, generator)

    def crops(self, order: BatchOrder, first: int) -> Iterator[UInt8[Tensor, "batch 3 height width"]]:
        """The same batches on the device as bytes, cropped and nothing else."""
        ahead = BATCHES_AHEAD * self.workers
        slots = BatchSlots(ahead + 2, order.batch_size, self.augment.size, self.device, shared=self.workers > 0)
        reader = DataLoader(
            FilledSlots(CroppedImages(self.source, self.augment, self.seed), slots.pixels),
            sampler=SlotRequests(CropRequests(order, first), slots),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=BATCHES_AHEAD if self.workers else None,
            worker_init_fn=ignore_signals,
        )
        with slots:
            for slot, bad in reader:
                for description in bad:
                    self.bad_images.add(description)
                yield slots.read(slot)


class GpuStreamingLoader(StreamingLoader):
    """JPEGs read by threads as they are needed, and decoded, cropped and augmented on the device."""

    def __init__(
        self,
        source: ImageSource,
        augment: Augment,
        device: torch.device,
        bad_images: BadImages,
        seed: int,
        decoder: Decoder,
        rank: int = 0,
        workers: int = 2,
    ) -> None:
        super().__init__(source, augment, device, bad_images, seed, rank, workers)
        self.decoder = decoder
        self.description = (
            f"streaming: {self.n_images:,} images, decoded on {device}, read by {max(1, workers)} threads"
        )

    def crops(self, order: BatchOrder, first: int) -> Iterator[UInt8[Tensor, "batch 3 height width"]]:
        """The batches on the device as bytes, cropped and nothing else."""
        maker = GpuCrops(self.source, self.augment, self.device, self.seed, self.decoder, self.workers)
        for pixels, bad in maker.batches(iter(CropRequests(order, first))):
            for description in bad:
                self.bad_images.add(description)
            yield pixels


def read_or_next(source: ImageSource, index: int) -> tuple[UInt8[Tensor, "3 height width"], list[str]]:
    """The image, or the first good one after it with the descriptions of the bad ones in between."""
    return first_good(source, index, source.read)


def store_images(
    source: ImageSource,
    used_size: tuple[int, int],
    bad_images: BadImages,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    workers: int = 0,
    cached: bool = False,
) -> StoredImages:
    """Decode all images once; images of different sizes are squashed to one, bad ones are left out.

    With `cached` images of one size come from the cache of decoded images, or go there.
    """
    stacked = source.stacked()
    if stacked is not None:
        return StoredImages(stacked.to(device), None)
    common = common_size(source)
    size = common or (round(used_size[0] * STORED_TO_USED), round(used_size[1] * STORED_TO_USED))
    decoded = decoded_images(source, size, workers, progress) if cached and common is not None else None
    if decoded is not None:
        return _from_cache(decoded, source, bad_images, device)
    pixels = torch.empty(len(source), 3, *size, dtype=torch.uint8, device=device)
    bad: dict[int, str] = {}
    sizes: dict[int, tuple[int, int]] = {}
    kept = 0
    for piece in decode_in_pieces(source, size, workers):
        _tell_bad(source, piece.bad, bad_images)
        good = piece.pixels[_all_but(len(piece.pixels), [index - piece.first for index in piece.bad])]
        pixels[kept : kept + len(good)] = good
        kept += len(good)
        bad.update(piece.bad)
        sizes.update(piece.sizes)
        if progress is not None:
            progress(piece.first + len(piece.pixels), len(source))
    return StoredImages(pixels[:kept], _original_sizes(len(source), size, sizes, bad))


def _from_cache(
    decoded: DecodedImages, source: ImageSource, bad_images: BadImages, device: torch.device | str
) -> StoredImages:
    record = decoded.record
    _tell_bad(source, record.bad, bad_images)
    pixels = decoded.pixels[_all_but(len(source), record.bad)] if record.bad else decoded.pixels
    size = (pixels.shape[2], pixels.shape[3])
    sizes = _original_sizes(len(source), size, record.sizes, record.bad)
    return StoredImages(pixels.to(device), sizes, from_cache=not decoded.fresh)


def _tell_bad(source: ImageSource, bad: Mapping[int, str], bad_images: BadImages) -> None:
    for index, reason in bad.items():
        bad_images.add(str(BadImage(source.describe(index), reason)))


def _all_but(count: int, places: Iterable[int]) -> Bool[Tensor, " n"]:
    kept = torch.ones(count, dtype=torch.bool)
    kept[list(places)] = False
    return kept


def _original_sizes(
    count: int, size: tuple[int, int], sizes: Mapping[int, tuple[int, int]], bad: Iterable[int]
) -> Int[Tensor, "n 2"] | None:
    if not sizes:
        return None
    found = torch.tensor([size]).repeat(count, 1)
    found[list(sizes)] = torch.tensor(list(sizes.values()))
    return found[_all_but(count, bad)]


def common_size(source: ImageSource) -> tuple[int, int] | None:
    """The size of all images as far as some of them, evenly spread, tell; None if they differ."""
    step = max(1, len(source) // SIZES_LOOKED_AT)
    sizes = set()
    for index in range(0, len(source), step):
        try:
            sizes.add(source.size(index))
        except BadImage:
            continue
        if len(sizes) > 1:
            return None
    return sizes.pop() if sizes else None


def choose_mode(
    source: ImageSource, device: torch.device, processes_on_host: int = 1
) -> Literal["resident", "streaming"]:
    """Resident if the images have one size, so that nothing is lost, and fit into a part of the memory."""
    size = common_size(source)
    if size is None:
        return "streaming"
    needed = len(source) * 3 * size[0] * size[1]
    return "resident" if needed <= resident_budget(device, processes_on_host) else "streaming"


def resident_budget(device: torch.device, processes_on_host: int = 1) -> int:
    """Bytes of images that may stay in the memory of this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * RESIDENT_PART_OF_GPU)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * RESIDENT_PART_OF_HOST / processes_on_host)


def open_loader(
    source: ImageSource,
    augment: Augment,
    device: torch.device,
    bad_images: BadImages,
    seed: int,
    rank: int = 0,
    mode: LoaderMode = "auto",
    workers: int = 2,
    processes_on_host: int = 1,
    progress: Progress | None = None,
    decode: Decode = "auto",
) -> Loader:
    """The loader that suits the data and the device, or the one that is asked for.

    `decode` says where streamed JPEGs are decoded: both see the same crops, whose pixels differ by a decoder's rounding.
    """
    if mode == "auto":
        mode = choose_mode(source, device, processes_on_host)
    if mode == "streaming":
        return _open_streaming(source, augment, device, bad_images, seed, rank, workers, decode)
    stored = store_images(source, augment.size, bad_images, progress, device, workers, cached=True)
    return ResidentLoader(stored, augment, device, seed, rank)


def _open_streaming(
    source: ImageSource,
    augment: Augment,
    device: torch.device,
    bad_images: BadImages,
    seed: int,
    rank: int,
    workers: int,
    decode: Decode,
) -> StreamingLoader:
    decodes_on_cpu = decode == "cpu" or (decode == "auto" and workers >= ENOUGH_WORKERS)
    decoder, obstacle = (None, "") if decodes_on_cpu else find_gpu_decoder(source, device)
    if decode == "gpu" and decoder is None:
        raise InputError(f"speed.decode is gpu, but {obstacle}: choose auto or cpu.")
    if decoder is not None:
        return GpuStreamingLoader(source, augment, device, bad_images, seed, decoder, rank, workers)
    loader = StreamingLoader(source, augment, device, bad_images, seed, rank, workers)
    if obstacle and device.type == "cuda":
        loader.description += f" (not on the GPU: {obstacle})"
    return loader


def choices_of(loader: Loader) -> dict[str, str]:
    """What `mode` and `decode` came to, by the names of the configuration."""
    return {
        "loader": "resident" if isinstance(loader, ResidentLoader) else "streaming",
        "decode": "gpu" if isinstance(loader, GpuStreamingLoader) else "cpu",
    }


def find_gpu_decoder(source: ImageSource, device: torch.device) -> tuple[Decoder | None, str]:
    """The decoder of this device for this source; or None and what stands in its way."""
    if device.type != "cuda":
        return None, f"the device is {device}"
    if not are_jpegs(source):
        return None, f"the images of '{source.name}' are not stored as JPEGs"
    decoder = gpu_decoder(device)
    return decoder, "" if decoder else f"torchvision's decoder does not work there: {decoder_obstacle(device)}"
