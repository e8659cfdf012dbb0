"""Frozen features: pooled tokens of an encoder's last layers, extracted once and cached on disk.

They are written chunk by chunk: memory holds one chunk, an interruption loses one, and several processes share the work.
They are read memory-mapped.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from safetensors.torch import load_file, save_file
from torch import Tensor

from stop_mim.data.augment import TestView
from stop_mim.data.batches import Batches, Placement, resident_budget
from stop_mim.data.cache import cache_folder, cached_file, damage_named, require_writable_cache
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.order import SequentialOrder
from stop_mim.errors import InputError
from stop_mim.training.distributed import Ranks, wait_for_all
from stop_mim.training.inputs import workers_for

if TYPE_CHECKING:
    from stop_mim.evaluation.subject import Subject

# Large enough for the disk's full speed, and small: the last chunk is written while nothing is computed.
CHUNK_IMAGES = 4096
# Part of the cache key: raise it when the same images give other features, or other chunks.
VERSION = 3
IMAGES_AT_A_TIME = 256

Chunks = Sequence[Float[Tensor, "_ _"]]
Indices = Int64[np.ndarray, " n"]


@dataclass(frozen=True)
class Features:
    """Features of the readable images of a source, in memory-mapped chunks; the last layer comes last."""

    chunks: tuple[Float[Tensor, "_ _"], ...]
    indices: Int[Tensor, " n"]
    layer_dim: int

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def layers(self) -> int:
        """Number of last layers in the features."""
        return self.chunks[0].shape[1] // self.layer_dim

    def last(self, layers: int) -> "Features":
        """Return the features of the last layers only."""
        if layers > self.layers:
            raise ValueError(
                f"Features of {layers} layers are asked for, and {self.layers} were extracted: see FeatureTask."
            )
        return Features(
            tuple(chunk[:, -layers * self.layer_dim :] for chunk in self.chunks), self.indices, self.layer_dim
        )

    def rows(self, positions: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        """Return the features at these positions, in memory."""
        ends = torch.tensor([len(chunk) for chunk in self.chunks]).cumsum(0)
        found = torch.empty(len(positions), self.chunks[0].shape[1])
        for chunk, end in zip(self.chunks, ends, strict=True):
            start = end - len(chunk)
            here = (positions >= start) & (positions < end)
            found[here] = chunk[positions[here] - start].float()
        return found

    def of_images(self, indices: np.ndarray) -> "Features":
        """Return the features of the images with these indices, or self, without a copy, if they are all images."""
        here = torch.isin(self.indices, torch.from_numpy(np.asarray(indices, dtype=np.int64)))
        if here.all():
            return self
        rows: Int[Tensor, " n"] = here.nonzero()[:, 0]
        return Features((self.rows(rows),), self.indices[rows], self.layer_dim)

    def on(self, device: torch.device) -> Float[Tensor, "n dim"]:
        """Return all features in full precision on a device."""
        return torch.cat([chunk.to(device).float() for chunk in self.chunks])

    def chunks_for(self, ranks: Ranks) -> Chunks:
        """Return all features on the device as one chunk if they fit into its memory, else the chunks as they are on disk."""
        size = 4 * len(self) * self.chunks[0].shape[1]
        fits = size <= resident_budget(ranks.device, ranks.processes_on_host)
        return [self.on(ranks.device)] if fits else self.chunks


class LabelledFeatures(NamedTuple):
    """Features of images, and the class of each."""

    features: Features
    labels: Int[Tensor, " n"]

    @classmethod
    def in_memory(
        cls, features: Float[Tensor, "n layers_times_dim"], labels: Int[Tensor, " n"], layers: int = 1
    ) -> "LabelledFeatures":
        """Return features that were computed elsewhere, with their classes; the last layer comes last."""
        return cls(Features((features,), torch.arange(len(features)), features.shape[1] // layers), labels)

    def of_images(self, indices: Indices) -> "LabelledFeatures":
        """Return features and classes of the images with these indices."""
        part = self.features.of_images(indices)
        return LabelledFeatures(part, self.labels[torch.isin(self.features.indices, part.indices)])

    def last_layer(self, device: torch.device) -> tuple[Float[Tensor, "n dim"], Int[Tensor, " n"]]:
        """Return features of the last layer, in full precision, and classes, on a device."""
        return self.features.last(1).on(device), self.labels.to(device)


def features_folder(subject: "Subject", source: ImageSource, view: TestView, images: Indices | None = None) -> Path:
    """Return the cache folder of the features of all images, or of some; a GPU computes in bf16 and has its own folder."""
    seen = [source.fingerprint(), view.size, view.resize_to, view.interpolation]
    some = [] if images is None else [images.tobytes()]
    key = digest([VERSION, subject.fingerprint, *seen, subject.layers, subject.ranks.device.type, *some])
    return cache_folder() / "features" / key


def extract_features(
    subject: "Subject", source: ImageSource, view: TestView, images: Indices | None = None
) -> Features:
    """Return the features of all images, or of some, in ascending order.

    The chunks that the cache lacks are computed, each by one process.
    """
    ranks, speed, folder = subject.ranks, subject.config.speed, features_folder(subject, source, view, images)
    images = np.arange(len(source)) if images is None else images
    chunks = range(-(-len(images) // CHUNK_IMAGES))
    mine = [c for c in chunks if c % ranks.world_size == ranks.rank and not _chunk_file(folder, c).exists()]
    if mine:
        require_writable_cache(folder)
        # Not in inference mode, in which the weights would become tensors that cannot be trained.
        subject.encoder.to(ranks.device)
        here = np.concatenate([images[c * CHUNK_IMAGES : (c + 1) * CHUNK_IMAGES] for c in mine])
        # The batch size divides the chunk size, so that no batch belongs to two chunks.
        largest = speed.batch_size_per_device or IMAGES_AT_A_TIME
        batch_size = next(size for size in range(largest, 0, -1) if CHUNK_IMAGES % size == 0)
        order, placement = SequentialOrder(here, batch_size), Placement(workers=workers_for(speed, ranks))
        decoding = subject.bar(f"decoding {source.name}")
        batches = Batches(source, order, view, placement, ranks.device, progress=decoding)
        written: Future[None] | None = None
        with ThreadPoolExecutor(1) as writer, closing(_embedded(subject, batches)) as embedded:
            for chunk in mine:
                parts = list(islice(embedded, CHUNK_IMAGES // batch_size))
                # While a chunk is written the next one is computed.
                if written is not None:
                    written.result()
                written = writer.submit(_write_chunk, _chunk_file(folder, chunk), parts)
            if written is not None:
                written.result()
    wait_for_all(ranks)
    return _read_features(folder, len(chunks), subject.encoder.dim, source.name)


@torch.inference_mode()
def _embedded(subject: "Subject", batches: Batches) -> Generator[tuple[Int[Tensor, " batch"], Tensor], None, None]:
    """Yield the numbers of images and their features."""
    encoder, done = subject.encoder, 0
    progress = subject.bar(f"{subject.name} features of {batches.source.name}")
    for images, _, numbers in batches.starting_at():
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
            features = encoder.embed(images, subject.layers)
        done += len(numbers)
        progress(done, batches.n_images)
        # Half precision holds features after a norm; a value that it cannot hold is found when the chunk is written.
        yield numbers, features.half()


def _write_chunk(path: Path, parts: list[tuple[Tensor, Tensor]]) -> None:
    indices = torch.cat([numbers for numbers, _ in parts] or [torch.empty(0, dtype=torch.long)])
    features = torch.cat([features for _, features in parts] or [torch.empty(0, 0, dtype=torch.half)])
    require_finite(features)
    tensors = {"features": features.cpu(), "indices": indices}
    cached_file(str(path), lambda draft: save_file(tensors, draft))


def require_finite(features: Tensor) -> None:
    """Raise InputError unless all features of an encoder are finite."""
    if not torch.isfinite(features).all():
        raise InputError(
            "The encoder gives features that are not finite: check its weights, or the run's log for warnings."
        )


def _chunk_file(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:06d}.safetensors"


def _read_features(folder: Path, n_chunks: int, layer_dim: int, name: str) -> Features:
    parts = []
    for path in (_chunk_file(folder, chunk) for chunk in range(n_chunks)):
        with damage_named(path):
            part = load_file(path)
        if len(part["indices"]):
            parts.append(part)
    if not parts:
        raise InputError(f"None of the images of '{name}' can be read: check the data.")
    return Features(
        tuple(part["features"] for part in parts), torch.cat([part["indices"] for part in parts]), layer_dim
    )
