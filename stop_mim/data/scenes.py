"""Procedural scenes of 3 to 10 solids on a textured ground, with count, nearest distance and instance masks."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor

from stop_mim.data.cache import cached_file
from stop_mim.data.scene_layout import (
    FEWEST_OBJECTS,
    MOST_OBJECTS,
    NEAREST,
    Layout,
    draw_layout,
    draw_places,
    draw_walks,
    fold,
    inner,
    turns,
    uniform,
)
from stop_mim.data.scene_renderer import SAMPLES_PER_SIDE, all_visible, render
from stop_mim.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

RENDERER_VERSION = 1
SMALLEST_SIZE = 32
# Of all scenes together, which are held in memory: 64 GiB.
MOST_PIXELS = 2**34
CHUNK = 16
RAYS_AT_ONCE = 1 << 17
STILLS, VIDEOS = 0, 1


@dataclass(frozen=True)
class Scenes:
    """A batch of rendered scenes: mask 0 is the ground, 1 to count the objects; distances are to object centres."""

    images: UInt8[Tensor, "n 3 size size"]
    masks: UInt8[Tensor, "n size size"]
    counts: Int64[Tensor, " n"]
    nearest_distances: Float32[Tensor, " n"]


def _draw_chunk(seed: int, chunk: int) -> Layout:
    """The scenes of one chunk: where an object is hidden the places alone are drawn anew, the labels stay."""
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


def _split(layout: Layout, size: int) -> list[Layout]:
    """As many scenes at a time as memory is meant for."""
    at_once = max(1, RAYS_AT_ONCE // (size * SAMPLES_PER_SIDE) ** 2)
    return [layout.pick(part) for part in torch.arange(len(layout.counts)).split(at_once)]


def _in_threads(work: Callable[[Item], Result], items: list[Item]) -> Iterator[Result]:
    """Results in order, one item a thread: torch's own threads, at a barrier after every operation, are far slower."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(threads)


def _render_span(span: range, size: int, seed: int) -> Scenes:
    """Scenes of one chunk."""
    chunk = span.start // CHUNK
    layout = _draw_chunk(seed, chunk).pick(torch.arange(span.start, span.stop) - chunk * CHUNK)
    away = layout.centres - layout.eyes[:, None]
    counted = torch.arange(MOST_OBJECTS) < layout.counts[:, None]
    nearest = torch.where(counted, inner(away, away).sqrt(), torch.inf).amin(1)
    images, masks = zip(*(render(part, size) for part in _split(layout, size)), strict=True)
    return Scenes(torch.cat(images), torch.cat(masks), layout.counts, nearest)


def _spans(first: int, count: int) -> list[range]:
    """The scenes asked for, cut where chunks begin."""
    cuts = [first, *range(first // CHUNK * CHUNK + CHUNK, first + count, CHUNK), first + count]
    return [range(low, high) for low, high in pairwise(cuts)]


def render_scenes(count: int, size: int = 64, seed: int = 0, first: int = 0) -> Scenes:
    """Return scenes number `first` to `first + count` of the endless sequence of the seed."""
    # Filled in place, so that nothing is held twice.
    whole = Scenes(
        images=torch.empty(count, 3, size, size, dtype=torch.uint8),
        masks=torch.empty(count, size, size, dtype=torch.uint8),
        counts=torch.empty(count, dtype=torch.long),
        nearest_distances=torch.empty(count),
    )
    done = 0
    for part in _in_threads(lambda span: _render_span(span, size, seed), _spans(first, count)):
        upto = done + len(part.counts)
        for field in fields(Scenes):
            getattr(whole, field.name)[done:upto] = getattr(part, field.name)
        done = upto
    return whole


def load_scenes(count: int, size: int = 64, seed: int = 0) -> Scenes:
    """Return `render_scenes`, through the cache."""

    def write(draft: Path) -> None:
        scenes = render_scenes(count, size, seed)
        save_file({field.name: getattr(scenes, field.name) for field in fields(Scenes)}, draft)

    file = cached_file(f"scenes/renderer{RENDERER_VERSION}-seed{seed}-size{size}-count{count}.safetensors", write)
    return Scenes(**load_file(file.path))


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


def _draw_clip(seed: int, index: int, frames: int) -> Layout:
    """The frames of a clip as scenes; however many are asked for, the first ones stay the same."""
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


def render_video(
    index: int, frames: int = 24, size: int = 128, seed: int = 0
) -> tuple[UInt8[Tensor, "time 3 size size"], UInt8[Tensor, "time size size"]]:
    """Return the frames and masks of clip number `index` of the seed: 2 to 4 moving objects that keep their numbers."""
    parts = _split(_draw_clip(seed, index, frames), size)
    pictures, masks = zip(*_in_threads(lambda part: render(part, size), parts), strict=True)
    return torch.cat(pictures), torch.cat(masks)
