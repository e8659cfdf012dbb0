"""Datasets and clips of procedural scenes: 3 to 10 solids on a textured ground, with count, nearest distance and masks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor

from stop_mim.data.cache import cached_file
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.scenes import (
    FEWEST_OBJECTS,
    MOST_OBJECTS,
    NEAREST,
    SAMPLES_PER_SIDE,
    Layout,
    all_visible,
    dot,
    draw_layout,
    draw_places,
    draw_walks,
    fold,
    render,
    turns,
    uniform,
)
from stop_mim.data.sources import SOURCES, SourceKind
from stop_mim.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

RENDERER_VERSION = 1
SMALLEST_SIZE = 32
# All scenes of a dataset are held in memory: 64 GiB.
MOST_PIXELS = 2**34
CHUNK = 16
RAYS_AT_ONCE = 1 << 17
STILLS, VIDEOS = 0, 1

_DEFAULTS = {"count": 10_000, "size": 64, "seed": 0}
# Added to the seed for every split but the training split: seeds that a user gives are smaller.
_TEST_SEED_OFFSET = 2**31


@SOURCES.register("scenes")
class SceneKind(SourceKind):
    """Scenes that are rendered when they are first used."""

    help = "scenes[:count=…,size=…,seed=…]"

    @classmethod
    def matches(cls, name: str) -> bool:
        return name.partition(":")[0] == "scenes"

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        """Render the scenes; splits other than train have a fifth of the images."""
        chosen = parse_options(name.partition(":")[2], _DEFAULTS)
        if split != "train":
            chosen |= {"count": max(1, chosen["count"] // 5), "seed": chosen["seed"] + _TEST_SEED_OFFSET}
        return SceneSource(**chosen)


class SceneSource(ImageSource):
    """Scenes in memory, labelled with the count of objects and the distance of the nearest."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.scenes, self.seed = load_scenes(count, size, seed), seed
        labels = {"count": self.scenes.counts.numpy(), "distance": self.scenes.nearest_distances.numpy()}
        super().__init__(f"scenes:count={count},size={size},seed={seed}", labels)

    def __len__(self) -> int:
        return len(self.scenes.images)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        self.check_index(index)
        return self.scenes.images[index]

    def enlarged(self, index: int, side: int) -> UInt8[Tensor, "3 height width"]:
        return render_scenes(1, side, self.seed, index).images[0]

    def image_name(self, index: int) -> str:
        return f"scene-{index}"

    def fingerprint(self) -> str:
        return digest([self.name, self.scenes.images[0].numpy().tobytes()])

    def stacked(self) -> UInt8[Tensor, "n 3 height width"]:
        return self.scenes.images


def parse_options(options: str, defaults: Mapping[str, int]) -> dict[str, int]:
    """Parse "key=value,…" of a name such as scenes:count=100,size=64."""
    chosen = dict(defaults)
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in chosen:
            raise InputError(f"scenes has no option '{key}': choose among {', '.join(chosen)}.")
        least = {"size": SMALLEST_SIZE, "seed": 0}.get(key, 1)
        if not value.isdecimal() or int(value) < least:
            raise InputError(f"The option {key} of scenes is '{value}': give a whole number of at least {least}.")
        chosen[key] = int(value)
    if chosen["count"] * chosen["size"] ** 2 > MOST_PIXELS:
        raise InputError(f"'scenes:{options}' does not fit into memory: give a smaller count or size.")
    return chosen


@dataclass(frozen=True)
class Scenes:
    """Rendered scenes: mask 0 is the ground, 1 to count the objects; distances are to object centres."""

    images: UInt8[Tensor, "n 3 size size"]
    masks: UInt8[Tensor, "n size size"]
    counts: Int64[Tensor, " n"]
    nearest_distances: Float32[Tensor, " n"]


def load_scenes(count: int, size: int = 64, seed: int = 0) -> Scenes:
    """Return `render_scenes`, through the cache."""
    name = f"scenes/renderer{RENDERER_VERSION}-seed{seed}-size{size}-count{count}.safetensors"
    file = cached_file(name, lambda draft: save_file(vars(render_scenes(count, size, seed)), draft))
    return Scenes(**load_file(file.path))


def render_scenes(count: int, size: int = 64, seed: int = 0, first: int = 0) -> Scenes:
    """Return scenes number `first` to `first + count` of the endless sequence of the seed."""
    # Filled in place, so that nothing is held twice.
    whole = Scenes(
        images=torch.empty(count, 3, size, size, dtype=torch.uint8),
        masks=torch.empty(count, size, size, dtype=torch.uint8),
        counts=torch.empty(count, dtype=torch.long),
        nearest_distances=torch.empty(count),
    )

    def render_chunk(chunk: int) -> None:
        wanted = torch.arange(max(first, chunk * CHUNK), min(first + count, (chunk + 1) * CHUNK))
        layout = _draw_chunk(seed, chunk).pick(wanted - chunk * CHUNK)
        away = layout.centres - layout.eyes[:, None]
        counted = torch.arange(MOST_OBJECTS) < layout.counts[:, None]
        places = wanted - first
        whole.counts[places] = layout.counts
        whole.nearest_distances[places] = torch.where(counted, dot(away, away, axis=-1).sqrt(), torch.inf).amin(1)
        for part in _groups(len(wanted), size):
            whole.images[places[part]], whole.masks[places[part]] = render(layout.pick(part), size)

    _in_threads(render_chunk, range(first // CHUNK, -(-(first + count) // CHUNK)))
    return whole


def render_video(
    index: int, frames: int = 24, size: int = 128, seed: int = 0
) -> tuple[UInt8[Tensor, "time 3 size size"], UInt8[Tensor, "time size size"]]:
    """Return the frames and masks of clip number `index` of the seed: 2 to 4 moving objects that keep their numbers."""
    clip = _draw_clip(seed, index, frames)
    images, masks = zip(*_in_threads(lambda part: render(clip.pick(part), size), _groups(frames, size)), strict=True)
    return torch.cat(images), torch.cat(masks)


def _groups(count: int, size: int) -> tuple[Int64[Tensor, " _"], ...]:
    """Return the numbers of `count` scenes in groups that bound the memory of rendering."""
    return torch.arange(count).split(max(1, RAYS_AT_ONCE // (size * SAMPLES_PER_SIDE) ** 2))


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results in order, one item a thread: torch's own threads wait for one another after every operation."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)


def _draw_chunk(seed: int, chunk: int) -> Layout:
    """Return the scenes of one chunk; where an object is hidden only the places are drawn again, and labels stay."""
    rng = np.random.default_rng([seed, STILLS, chunk])
    counts = torch.from_numpy(rng.integers(FEWEST_OBJECTS, MOST_OBJECTS + 1, CHUNK))
    nearest = uniform(rng, *NEAREST, CHUNK)
    layout = replace(draw_layout(rng, CHUNK), counts=counts)
    hidden = torch.arange(CHUNK)
    while len(hidden):
        places = draw_places(rng, layout, nearest)
        layout = replace(layout, centres=layout.centres.index_copy(0, hidden, places[hidden]))
        hidden = hidden[~all_visible(layout.pick(hidden))]
    return layout


def _draw_clip(seed: int, index: int, frames: int) -> Layout:
    """Return the frames of a clip as scenes; the first frames do not depend on the number of frames."""
    rng = np.random.default_rng([seed, VIDEOS, index])
    some = int(rng.integers(2, 5))
    layout = draw_layout(rng, 1)
    layout = replace(layout, counts=torch.tensor([some]), extents=layout.extents * 1.25)
    time = torch.arange(frames)[:, None]
    drift, spin = uniform(rng, -0.02, 0.02, 1, 1), uniform(rng, -0.1, 0.1, 1, MOST_OBJECTS)
    yaws = uniform(rng, 0.0, 2 * np.pi, 1, MOST_OBJECTS) + spin * time
    shift = fold(drift * time, -0.5, 0.5) * torch.tensor([1.0, 0.0, 0.0])
    while True:
        walks = draw_walks(rng, layout, frames)
        if all_visible(replace(layout, centres=walks[:1])).all():
            break
    clip = layout.pick(torch.zeros(frames, dtype=torch.long))
    return replace(clip, centres=walks, turns=turns(yaws), eyes=clip.eyes + shift)
