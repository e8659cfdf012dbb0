"""Procedural scenes of 3 to 10 solids on a textured ground, with count, nearest distance and instance masks."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stop_mim.data import cache
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
from stop_mim.files import write_atomically

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]

RENDERER_VERSION = 1
SMALLEST_SIZE = 32
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


@dataclass(frozen=True)
class SceneVideo:
    """One rendered clip: an object keeps its mask number in all frames."""

    frames: UInt8[Tensor, "time 3 size size"]
    masks: UInt8[Tensor, "time size size"]


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


def _require(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} is {value}: give a whole number {bounds}.")


def _require_sequence(count: int, size: int, seed: int, first: int) -> None:
    _require("the number of scenes", count, 1)
    _require("the size of the scenes", size, SMALLEST_SIZE)
    _require("the seed of the scenes", seed, 0)
    _require("the first scene", first, 0)


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


def _render_sequence(count: int, size: int, seed: int, first: int, progress: Progress | None) -> Scenes:
    """All chunks in one batch, which is filled in place so that nothing is held twice."""
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
        if progress is not None:
            progress(done, count)
    return whole


def render_scenes(count: int, size: int = 64, seed: int = 0, first: int = 0) -> Scenes:
    """Scenes number `first` to `first + count` of the endless sequence that the seed names."""
    _require_sequence(count, size, seed, first)
    return _render_sequence(count, size, seed, first, None)


def _read_cache(file: Path, count: int, size: int) -> Scenes | None:
    """The scenes of a file that this renderer wrote in full, else nothing."""
    try:
        with safe_open(file, "pt") as stored:
            if (stored.metadata() or {}).get("renderer") != str(RENDERER_VERSION):
                return None
            scenes = Scenes(**{field.name: stored.get_tensor(field.name) for field in fields(Scenes)})
    except (OSError, SafetensorError):
        return None
    return scenes if scenes.images.shape == (count, 3, size, size) else None


def _write_cache(file: Path, scenes: Scenes) -> None:
    tensors = {field.name: getattr(scenes, field.name) for field in fields(Scenes)}
    try:
        write_atomically(file, lambda draft: save_file(tensors, draft, {"renderer": str(RENDERER_VERSION)}))
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the cache folder {file.parent} cannot be written ({error}): set STOP_MIM_CACHE to a folder that can."
        ) from error


def load_scenes(
    count: int,
    size: int = 64,
    seed: int = 0,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> Scenes:
    """`render_scenes`, kept in the sub-folder scenes of the cache folder: $STOP_MIM_CACHE, else ~/.cache/stop-mim.

    A file that cannot be read, or that another renderer version made, is rendered anew.
    """
    _require_sequence(count, size, seed, 0)
    folder = cache_folder or cache.cache_folder()
    file = folder / "scenes" / f"seed{seed}-size{size}-count{count}.safetensors"
    scenes = _read_cache(file, count, size)
    if scenes is None:
        scenes = _render_sequence(count, size, seed, 0, progress)
        _write_cache(file, scenes)
    elif progress is not None:
        progress(count, count)
    return scenes


def _draw_clip(seed: int, index: int, frames: int, objects: int | None) -> Layout:
    """The frames of a clip as scenes; however many are asked for, the first ones stay the same."""
    rng = np.random.default_rng([seed, VIDEOS, index])
    some = int(rng.integers(2, 5))
    layout = draw_layout(rng, 1)
    layout = replace(layout, counts=torch.tensor([objects or some]), extents=layout.extents * 1.25)
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
    index: int, frames: int = 24, size: int = 128, seed: int = 0, objects: int | None = None
) -> SceneVideo:
    """Clip number `index` of the endless sequence that the seed names: 2 to 4 objects unless told, wandering about."""
    _require("the number of the video", index, 0)
    _require("the number of frames", frames, 1)
    _require("the size of the video", size, SMALLEST_SIZE)
    _require("the seed of the video", seed, 0)
    if objects is not None:
        _require("the number of objects", objects, 1, MOST_OBJECTS)
    parts = _split(_draw_clip(seed, index, frames, objects), size)
    pictures, masks = zip(*_in_threads(lambda part: render(part, size), parts), strict=True)
    return SceneVideo(torch.cat(pictures), torch.cat(masks))
