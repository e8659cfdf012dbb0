"""Procedural scenes: random layouts, rendered to images and masks by ray casting.

On large tensors only +, -, *, / and sqrt are used, which round in the same way in every vector lane and thread: the bytes of a
scene depend neither on the batch that it is rendered in nor on the number of threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

RENDERER_VERSION = 1
"""Part of the cache's key: raise it when the same scene would have other pixels."""
FEWEST_OBJECTS, MOST_OBJECTS = 3, 10
HALF_VIEW = 0.31
NEAREST, FARTHEST = (7.5, 10.5), 14.5
TEXELS = 128
CLEAR_FRAMES = 48
PLACES_TRIED, WALKS_TRIED = 24, 32
SAMPLES_PER_SIDE = 2
REFERENCE_SIZE, VISIBLE_PIXELS = 64, 20
# Scenes are drawn in chunks of this many; a chunk is a function of the seed and its number.
CHUNK = 16
RAYS_AT_ONCE = 1 << 17
STILLS, VIDEOS = 0, 1

# Each solid fills [-1, 1] along z: a(x² + y²) + bz² + cz + d <= 0, cut by planes n·p <= w. ENDLESS cuts nothing.
ENDLESS = (0.0, 0.0, 1.0, 9.0)
BASE, TOP = (0.0, 0.0, -1.0, 1.0), (0.0, 0.0, 1.0, 1.0)
WALLS_X, WALLS_Y = ((1.0, 0.0, 0.0, 1.0), (-1.0, 0.0, 0.0, 1.0)), ((0.0, 1.0, 0.0, 1.0), (0.0, -1.0, 0.0, 1.0))
ROOF_X, ROOF_Y = ((2.0, 0.0, 1.0, 1.0), (-2.0, 0.0, 1.0, 1.0)), ((0.0, 2.0, 1.0, 1.0), (0.0, -2.0, 1.0, 1.0))
LOOSE = (1.0, 1.0, 0.0, -9.0)
SOLIDS = {
    "sphere": ((1.0, 1.0, 0.0, -1.0), ()),
    "cube": (LOOSE, (BASE, TOP, *WALLS_X, *WALLS_Y)),
    "cylinder": ((1.0, 0.0, 0.0, -1.0), (BASE, TOP)),
    "cone": ((1.0, -0.25, 0.5, -0.25), (BASE, TOP)),
    "bucket": ((1.0, -0.04, 0.32, -0.64), (BASE, TOP)),
    "dome": ((1.0, 0.25, 0.5, -0.75), (BASE,)),
    "pyramid": (LOOSE, (BASE, *ROOF_X, *ROOF_Y)),
    "roof": (LOOSE, (BASE, *ROOF_X, *WALLS_Y)),
}
QUADRICS = torch.tensor([quadric for quadric, _ in SOLIDS.values()])
PLANES = torch.tensor([[*planes, *[ENDLESS] * (6 - len(planes))] for _, planes in SOLIDS.values()]).transpose(0, 1)
SHORTEST = torch.tensor([1.0, 0.8, 0.8, 0.9, 0.8, 0.6, 0.9, 0.7])
TALLEST = torch.tensor([1.0, 1.3, 1.4, 1.4, 1.3, 0.8, 1.3, 1.0])

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Layout:
    """Objects, lights and camera of scenes; images of any size are rendered from it."""

    counts: Int64[Tensor, " n"]
    solids: Int64[Tensor, "n k"]
    centres: Float32[Tensor, "n k 3"]
    extents: Float32[Tensor, "n k 3"]
    turns: Float32[Tensor, "n k 2"]
    colours: Float32[Tensor, "n k 3"]
    gloss: Float32[Tensor, "n k"]
    eyes: Float32[Tensor, "n 3"]
    axes: Float32[Tensor, "n 3 3"]
    to_light: Float32[Tensor, "n 3"]
    sun: Float32[Tensor, "n 3"]
    ambient: Float32[Tensor, "n 3"]
    haze: Float32[Tensor, "n 3"]
    haze_reach: Float32[Tensor, " n"]
    grounds: Float32[Tensor, "n 2 3"]
    textures: Float32[Tensor, "n texels texels"]
    texture_steps: Float32[Tensor, "n 2"]

    def pick(self, scenes: Int64[Tensor, " m"]) -> "Layout":
        """Return these scenes, in this order; a scene may be repeated."""
        return Layout(**{field.name: getattr(self, field.name)[scenes] for field in fields(self)})


@dataclass(frozen=True)
class Scenes:
    """Rendered scenes: mask 0 is the ground, 1 to count the objects; distances are to object centres."""

    images: UInt8[Tensor, "n 3 size size"]
    masks: UInt8[Tensor, "n size size"]
    counts: Int64[Tensor, " n"]
    nearest_distances: Float32[Tensor, " n"]


def render_scenes(count: int, size: int = 64, seed: int = 0, first: int = 0) -> Scenes:
    """Return scenes number `first` to `first + count` of the endless sequence of the seed."""
    # Filled in place, so that no second copy is in memory.
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
    """Return the results in order, computed one item a thread: torch's own threads synchronise after every operation."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)


def _draw_chunk(seed: int, chunk: int) -> Layout:
    """Return the scenes of one chunk; if an object is hidden, only places are drawn again, and labels do not change."""
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


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Random numbers from low to high."""
    return torch.from_numpy(rng.random(shape, dtype=np.float32)) * (high - low) + low


def _colours(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """HSV to linear RGB along a new last axis; squaring undoes the square root that ends the rendering."""
    phase = (torch.tensor([5.0, 3.0, 1.0]) + 6 * hue[..., None]) % 6
    ramp = torch.minimum(phase, 4 - phase).clamp(0, 1)
    return (value[..., None] * (1 - saturation[..., None] * ramp)) ** 2


def _draw_textures(rng: np.random.Generator, n: int) -> Float32[Tensor, "n texels texels"]:
    """Fractal noise that tiles, alone or over checks, planks or grout."""
    roughness = uniform(rng, 0.45, 0.85, n, 1, 1)
    noise, amplitude = uniform(rng, -1.0, 1.0, n, 4, 4), torch.ones(n, 1, 1)
    while noise.shape[-1] < TEXELS:
        for axis in (1, 2):
            noise = torch.stack((noise, (noise + noise.roll(-1, axis)) / 2), axis + 1).flatten(axis, axis + 1)
        amplitude = amplitude * roughness
        noise = noise + amplitude * uniform(rng, -1.0, 1.0, *noise.shape)
    row, column = torch.arange(TEXELS)[:, None], torch.arange(TEXELS)[None, :]
    plain = torch.full((TEXELS, TEXELS), 0.5)
    checks = (row // 16 + column // 16) % 2
    planks = (row // 8 * 5 % 16) / 15 - ((row % 8 == 0) | ((column + row // 8 * 40) % 64 == 0)) * 0.4
    grout = 0.7 - ((row % 16 < 2) | (column % 16 < 2)) * 0.7
    patterns = torch.stack((plain, checks.float(), planks.float(), grout))
    kind = torch.from_numpy(rng.integers(0, len(patterns), n))
    strength = uniform(rng, 0.2, 0.4, n, 1, 1)
    return (patterns[kind] + strength * noise).clamp(0, 1)


def turns(yaws: Float32[Tensor, "n k"]) -> Float32[Tensor, "n k 2"]:
    """Cosines and sines, computed in float64: in float32 the last bit may depend on the tensor's length."""
    return torch.stack((yaws.double().cos(), yaws.double().sin()), -1).float()


def _draw_axes(pitch: Tensor, yaw: Tensor, roll: Tensor) -> Float32[Tensor, "n 3 3"]:
    """Rows: the camera's right, down and forward in the world, where z is up and the camera faces y."""
    zero = torch.zeros_like(pitch)
    forward = torch.stack((yaw.sin() * pitch.cos(), yaw.cos() * pitch.cos(), -pitch.sin()), -1)
    level = torch.stack((yaw.cos(), -yaw.sin(), zero), -1)
    steep = torch.linalg.cross(forward, level)
    cosine, sine = roll.cos()[:, None], roll.sin()[:, None]
    return torch.stack((level * cosine + steep * sine, steep * cosine - level * sine, forward), 1)


def draw_layout(rng: np.random.Generator, n: int) -> Layout:
    """Draw everything but counts and places; all ten objects are drawn, so that nothing here depends on the count."""
    k = MOST_OBJECTS
    solids = torch.from_numpy(rng.integers(0, len(SOLIDS), (n, k)))
    size, stretch = uniform(rng, 0.45, 0.9, n, k), uniform(rng, 0.0, 1.0, n, k)
    height = size * (SHORTEST[solids] + stretch * (TALLEST - SHORTEST)[solids])
    eye_height = uniform(rng, 4.6, 5.1, n)
    pitch = torch.atan(eye_height / 11.5) + uniform(rng, -0.015, 0.015, n)
    azimuth, elevation = uniform(rng, 0.0, 2 * np.pi, n), uniform(rng, 0.6, 0.95, n)
    across = elevation.cos()
    power, warmth = uniform(rng, 0.7, 1.25, n), uniform(rng, -0.12, 0.12, n)
    tint = torch.stack((1 + warmth, torch.ones(n), 1 - warmth), -1)
    ground_value = uniform(rng, 0.2, 0.72, n, 1) + uniform(rng, 0.08, 0.2, n, 1) * torch.tensor([-1.0, 1.0])
    turn, texel = uniform(rng, 0.0, 2 * np.pi, n), TEXELS / uniform(rng, 9.0, 22.0, n)
    return Layout(
        counts=torch.full((n,), k),
        solids=solids,
        centres=torch.zeros(n, k, 3),
        extents=torch.stack((size, size, height), -1),
        turns=turns(uniform(rng, 0.0, 2 * np.pi, n, k)),
        colours=_colours(uniform(rng, 0.0, 1.0, n, k), uniform(rng, 0.5, 0.95, n, k), uniform(rng, 0.5, 1.0, n, k)),
        gloss=uniform(rng, -1.0, 1.0, n, k).clamp(min=0),
        eyes=torch.stack((torch.zeros(n), torch.zeros(n), eye_height), -1),
        axes=_draw_axes(pitch, uniform(rng, -0.03, 0.03, n), uniform(rng, -0.05, 0.05, n)),
        to_light=torch.stack((across * azimuth.cos(), across * azimuth.sin(), elevation.sin()), -1),
        sun=tint * power[:, None],
        ambient=(2 - tint) * uniform(rng, 0.25, 0.5, n, 1),
        haze=_colours(uniform(rng, 0.0, 1.0, n), uniform(rng, 0.0, 0.3, n), uniform(rng, 0.15, 0.85, n)),
        haze_reach=uniform(rng, 18.0, 30.0, n),
        grounds=_colours(uniform(rng, 0.0, 1.0, n, 2), uniform(rng, 0.0, 0.3, n, 2), ground_value.clamp(0.08, 0.95)),
        textures=_draw_textures(rng, n),
        texture_steps=torch.stack((turn.cos() * texel, turn.sin() * texel), -1),
    )


def _stand(layout: Layout, distances: Tensor, bearings: Tensor) -> Tensor:
    """Return the centres of objects that stand on the ground at these distances and bearings from the camera."""
    height = layout.extents[..., 2].reshape(*layout.extents.shape[:2], *[1] * (distances.ndim - 2))
    drop = layout.eyes[:, 2].reshape(-1, *[1] * (distances.ndim - 1)) - height
    along = (distances**2 - drop**2).sqrt()
    return torch.stack((along * bearings.sin(), along * bearings.cos(), height.expand_as(along)), -1)


def dot(a: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """Return the dot products along an axis of length three; the order of the sum does not depend on the shape."""
    x, y, z = (a * b).unbind(axis)
    return x + y + z


def project(layout: Layout, points: Tensor) -> Tensor:
    """Project points (n, ..., 3) to image coordinates (n, ..., 2), which are -1 to 1 inside the image."""
    middle = [1] * (points.ndim - 2)
    seen = points - layout.eyes.reshape(-1, *middle, 3)
    right, down, forward = (dot(seen, axis.reshape(-1, *middle, 3), axis=-1) for axis in layout.axes.unbind(1))
    return torch.stack((right, down), -1) / (forward.clamp(min=0.5) * HALF_VIEW)[..., None]


def draw_places(rng: np.random.Generator, layout: Layout, nearest: Tensor) -> Tensor:
    """Draw the centres of objects in turn: the first of several random spots that is free on the ground and in the image."""
    (n, k), tries = layout.solids.shape, PLACES_TRIED
    distances = nearest[:, None, None] + uniform(rng, 0.02, 1.0, n, k, tries) * (FARTHEST - nearest)[:, None, None]
    distances[:, 0] = nearest[:, None]
    reach = layout.extents[..., 0]
    bearings = uniform(rng, -1.0, 1.0, n, k, tries) * (HALF_VIEW - 0.7 * reach[..., None] / distances)
    spots = _stand(layout, distances, bearings)
    views, spans = project(layout, spots), reach[..., None] / (distances * HALF_VIEW)
    chosen = torch.zeros(n, k, dtype=torch.long)
    everyone = torch.arange(n)[:, None]
    for i in range(1, k):
        earlier = (everyone, torch.arange(i)[None, :], chosen[:, :i])
        ground_gap = (spots[:, i, :, None, :2] - spots[earlier][:, None, :, :2]).square().sum(-1).sqrt()
        view_gap = (views[:, i, :, None] - views[earlier][:, None]).square().sum(-1).sqrt()
        clear = ground_gap / (1.25 * (reach[:, i, None] + reach[:, :i]))[:, None]
        apart = view_gap / (0.62 * (spans[:, i, :, None] + spans[earlier][:, None]))
        freedom = torch.minimum(clear, apart).amin(-1).clamp(max=1)
        chosen[:, i] = torch.from_numpy(freedom.numpy().argmax(1))
    return spots[everyone, torch.arange(k)[None, :], chosen]


def fold(values: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Reflect values at both bounds, so that a walk turns back there."""
    span = high - low
    phase = (values - low) % (2 * span)
    return low + torch.minimum(phase, 2 * span - phase)


def draw_walks(rng: np.random.Generator, layout: Layout, frames: int) -> Tensor:
    """Draw centres (frames, k, 3): the first of several random walks in which counted objects do not collide."""
    k, time, tries = layout.solids.shape[1], torch.arange(max(frames, CLEAR_FRAMES))[:, None], WALKS_TRIED
    shape, side = (tries, 1, k), torch.from_numpy(rng.choice(np.array([-1.0, 1.0], np.float32), (2, tries, 1, k)))
    edge = HALF_VIEW - 0.9 * layout.extents[..., 0] / 8
    bearings = uniform(rng, -1.0, 1.0, *shape) * edge + side[0] * uniform(rng, 0.004, 0.016, *shape) * time
    distances = uniform(rng, 8.0, 13.0, *shape) + side[1] * uniform(rng, 0.0, 0.12, *shape) * time
    many = layout.pick(torch.zeros(tries, dtype=torch.long))
    walks = _stand(many, fold(distances, 8.0, 13.0).mT, fold(bearings, -edge, edge).mT)
    counted, reach = int(layout.counts), layout.extents[0, :, 0]
    freedom = torch.ones(tries)
    for i, j in combinations(range(counted), 2):
        gaps = (walks[:, i, :CLEAR_FRAMES, :2] - walks[:, j, :CLEAR_FRAMES, :2]).square().sum(-1).sqrt().amin(1)
        freedom = torch.minimum(freedom, gaps / (1.2 * (reach[i] + reach[j])))
    return walks[int(freedom.numpy().argmax())].transpose(0, 1)[:frames]


class Hits(NamedTuple):
    """The rays that hit an object, and what each hits first."""

    rays: Int64[Tensor, " hits"]
    objects: Int64[Tensor, " hits"]
    distances: Float32[Tensor, " hits"]
    faces: Int64[Tensor, " hits"]


def _of(values: Float32[Tensor, "m c"], indices: Int64[Tensor, " p"]) -> Float32[Tensor, "c p"]:
    # index_select is several times faster than values[indices], and this runs for every ray near an object.
    return values.T.contiguous().index_select(1, indices)


def _planes(values: Float32[Tensor, "n c"]) -> Float32[Tensor, "c n 1"]:
    # Contiguous, because a result takes the memory order of its first operand.
    return values.T.contiguous()[:, :, None]


def _rays(layout: Layout, side: int) -> Float32[Tensor, "3 rays"]:
    """Unit directions of side x side rays for each scene, scene by scene and row by row."""
    grid = ((torch.arange(side) + 0.5) * (2 / side) - 1) * HALF_VIEW
    right, down, forward = (_planes(axis)[..., None] for axis in layout.axes.unbind(1))
    length = (1 + grid[None, :] * grid[None, :] + (grid * grid)[:, None]).sqrt()
    return ((forward + right * grid[None, :] + down * grid[:, None]) / length).flatten(1)


def _box_corners(layout: Layout, widening: float) -> Float32[Tensor, "n k 8 3"]:
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    sides = layout.extents[:, :, None] * signs * torch.tensor([widening, widening, 1.0])
    cosine, sine = layout.turns[:, :, None].unbind(-1)
    x, y, z = sides.unbind(-1)
    return layout.centres[:, :, None] + torch.stack((x * cosine - y * sine, x * sine + y * cosine, z), -1)


def _pairs(layout: Layout, points: Float32[Tensor, "n k corners 3"], side: int) -> tuple[Tensor, Tensor]:
    """Return (objects, rays) for all rays inside the bounding box of each counted object's points in the image."""
    n, k = layout.solids.shape
    pixels = ((project(layout, points) + 1) * (side / 2)).clamp(0, side)
    low, high = pixels.amin(2).floor().long(), pixels.amax(2).ceil().long()
    width, height = (high - low).flatten(0, 1).unbind(-1)
    left, top = low.flatten(0, 1).unbind(-1)
    height = height * (torch.arange(k) < layout.counts[:, None]).flatten()
    owners = torch.repeat_interleave(torch.arange(n * k), height)
    lines = torch.arange(len(owners)) - (height.cumsum(0) - height)[owners] + top[owners]
    widths = width[owners]
    shifts = (owners // k * side + lines) * side + left[owners] - (widths.cumsum(0) - widths)
    rows = torch.repeat_interleave(torch.arange(len(owners)), widths)
    return owners.index_select(0, rows), shifts.index_select(0, rows) + torch.arange(len(rows))


def _to_object(layout: Layout, objects: Tensor, vectors: Float32[Tensor, "3 p"]) -> Float32[Tensor, "3 p"]:
    """World vectors turned and scaled into the frames of their objects."""
    cosine, sine = _of(layout.turns.flatten(0, 1), objects)
    x, y, z = vectors
    return torch.stack((x * cosine + y * sine, y * cosine - x * sine, z)) / _of(layout.extents.flatten(0, 1), objects)


def _pierce(layout: Layout, objects: Tensor, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where lines enter and leave their objects, and through which face they enter: 0 is the curved one.

    The cone's quadric needs lines less steep than its side, which the elevations of camera and light guarantee.
    """
    o = _to_object(layout, objects, origins - _of(layout.centres.flatten(0, 1), objects))
    d, solids = _to_object(layout, objects, directions), layout.solids.flatten().index_select(0, objects)
    a, b, c, e = _of(QUADRICS, solids)
    square = a * (d[0] * d[0] + d[1] * d[1]) + b * d[2] * d[2]
    half = a * (o[0] * d[0] + o[1] * d[1]) + b * o[2] * d[2] + c * d[2] / 2
    rest = a * (o[0] * o[0] + o[1] * o[1]) + b * o[2] * o[2] + c * o[2] + e
    discriminant = half * half - square * rest
    root = discriminant.clamp(min=0).sqrt()
    enter, leave = (-half - root) / square, (-half + root) / square
    leave = torch.where(discriminant > 0, leave, enter - 1)
    face = torch.zeros_like(solids)
    for number, plane in enumerate(PLANES, start=1):
        *facing, offset = _of(plane, solids)
        slope = facing[0] * d[0] + facing[1] * d[1] + facing[2] * d[2]
        slope = torch.where(slope.abs() < 1e-7, 1e-7, slope)
        crossing = (offset - (facing[0] * o[0] + facing[1] * o[1] + facing[2] * o[2])) / slope
        later = (slope < 0) & (crossing > enter)
        enter, face = torch.where(later, crossing, enter), torch.where(later, number, face)
        leave = torch.where(slope > 0, torch.minimum(leave, crossing), leave)
    return enter, leave, face


def _normals(layout: Layout, objects: Tensor, points: Tensor, face: Tensor) -> Float32[Tensor, "3 p"]:
    """The outward unit normals of objects at points on their surfaces."""
    at = _to_object(layout, objects, points - _of(layout.centres.flatten(0, 1), objects))
    solids = layout.solids.flatten()[objects]
    a, b, c, _ = _of(QUADRICS, solids)
    flat = PLANES[(face - 1).clamp(min=0), solids, :3].T
    normal = torch.where(face == 0, torch.stack((a * at[0], a * at[1], b * at[2] + c / 2)), flat)
    x, y, z = normal / _of(layout.extents.flatten(0, 1), objects)
    cosine, sine = _of(layout.turns.flatten(0, 1), objects)
    world = torch.stack((x * cosine - y * sine, x * sine + y * cosine, z))
    return world / dot(world, world).sqrt()


def _cast(layout: Layout, rays: Float32[Tensor, "3 rays"], side: int) -> Hits:
    """Return the first object along each ray; integer keys of depth and object break ties between equal depths."""
    objects, pixels = _pairs(layout, _box_corners(layout, 1.0), side)
    origins = _of(layout.eyes, objects // layout.solids.shape[1])
    enter, leave, face = _pierce(layout, objects, origins, rays.index_select(1, pixels))
    met = ((leave > enter) & (enter > 0)).nonzero()[:, 0]
    enter, objects, pixels = enter[met], objects[met], pixels[met]
    keys = enter.view(torch.int32).long() * len(layout.solids.flatten()) + objects
    first = torch.full(rays.shape[1:], torch.iinfo(torch.long).max).scatter_reduce_(0, pixels, keys, "amin")
    won = (first[pixels] == keys).nonzero()[:, 0]
    return Hits(pixels[won], objects[won], enter[won], face[met[won]])


def _shadow(layout: Layout, points: Tensor, owners: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return how much of the sun (shadow) and of the sky (contact) the objects hide from each point, 0 to 1.

    A shadow is darker the longer the path through the object is, which softens its edge.
    """
    k, corners = layout.solids.shape[1], _box_corners(layout, 1.0)
    fallen = corners - (layout.to_light / layout.to_light[:, 2:])[:, None, None] * corners[..., 2:]
    around = _box_corners(layout, 1.5)[:, :, ::2]
    objects, pixels = _pairs(layout, torch.cat((corners, fallen, around), 2), side)
    away = points.index_select(1, pixels) - _of(layout.centres.flatten(0, 1), objects)
    to_light, (width, _, height) = _of(layout.to_light, objects // k), _of(layout.extents.flatten(0, 1), objects)
    beside = (away[0] * away[0] + away[1] * away[1]).sqrt() / width
    contact = ((1.5 - beside) / 0.7).clamp(0, 1) * (1 - (away[2] + height) / width).clamp(0, 1)
    ahead = dot(away, to_light)
    near = dot(away, away) - ahead * ahead < 2 * width * width + height * height
    other = owners.index_select(0, pixels) != objects
    chosen = (near & other).nonzero()[:, 0]
    objects, shaded = objects[chosen], pixels[chosen]
    enter, leave, _ = _pierce(layout, objects, points.index_select(1, shaded), to_light.index_select(1, chosen))
    umbra = ((leave - enter.clamp(min=0)) / (0.5 * width[chosen])).clamp(0, 1)
    empty = torch.zeros_like(points[0])
    return empty.scatter_reduce(0, shaded, umbra, "amax"), empty.scatter_reduce(0, pixels, contact * other, "amax")


def _ground(layout: Layout, points: Float32[Tensor, "3 n rays"], distances: Tensor) -> Float32[Tensor, "3 n rays"]:
    """Return the ground's colours, two mixed by the texture; its contrast fades where texels are finer than rays."""
    along, across = _planes(layout.texture_steps)
    column, row = points[0] * along - points[1] * across, points[0] * across + points[1] * along
    left, top = column.floor(), row.floor()
    right_share, low_share = column - left, row - top
    left, top, texels = left.long(), top.long(), layout.textures.flatten()
    start = (torch.arange(len(layout.counts)) * TEXELS**2)[:, None]

    def strip(line: Tensor) -> Tensor:
        begin = start + (line & TEXELS - 1) * TEXELS
        first, second = texels.take(begin + (left & TEXELS - 1)), texels.take(begin + (left + 1 & TEXELS - 1))
        return first + right_share * (second - first)

    upper, lower = strip(top), strip(top + 1)
    fourth = (distances / 17) * (distances / 17)
    mix = 0.5 + (upper + low_share * (lower - upper) - 0.5) / (1 + fourth * fourth)
    dark, light = map(_planes, layout.grounds.unbind(1))
    return dark + mix * (light - dark)


def _shade(
    layout: Layout, hits: Hits, rays: Tensor, points: Tensor, shadow: Tensor, contact: Tensor
) -> Float32[Tensor, "3 hits"]:
    """Return the colours of the objects: diffuse light, reflections of sky and ground by gloss, and a highlight."""
    scenes, view = hits.objects // layout.solids.shape[1], -rays.index_select(1, hits.rays)
    normals = _normals(layout, hits.objects, points.index_select(1, hits.rays), hits.faces)
    to_light, sun, ambient = (_of(of, scenes) for of in (layout.to_light, layout.sun, layout.ambient))
    colours, gloss = _of(layout.colours.flatten(0, 1), hits.objects), layout.gloss.flatten()[hits.objects]
    lit = 1 - shadow[hits.rays]
    sky = ambient * (0.65 + 0.35 * normals[2]) * (1 - 0.6 * contact[hits.rays])
    diffuse = colours * (sky + sun * lit * dot(normals, to_light).clamp(min=0))
    upward = (2 * dot(normals, view) * normals[2] - view[2]) * 1.5 + 0.5
    floor, above = _of(layout.grounds.mean(1), scenes), _of(layout.haze + 0.3, scenes)
    mirrored = (0.3 + 0.7 * colours) * (floor + upward.clamp(0, 1) * (above - floor)) * (0.3 + ambient + 0.3 * lit)
    halfway = to_light + view
    highlight = (dot(normals, halfway) / dot(halfway, halfway).sqrt()).clamp(min=0)
    for _ in range(5):
        highlight = highlight * highlight
    return diffuse + 0.6 * gloss * (mirrored - diffuse) + sun * lit * highlight * (0.08 + gloss)


def render(layout: Layout, size: int) -> tuple[UInt8[Tensor, "n 3 size size"], UInt8[Tensor, "n size size"]]:
    """Return images and masks: a pixel is the mean of its samples, a mask their lower median."""
    (n, k), side = layout.solids.shape, size * SAMPLES_PER_SIDE
    rays = _rays(layout, side)
    hits = _cast(layout, rays, side)
    steep = (-rays[2]).clamp(min=0.04).reshape(n, -1)
    distances = layout.eyes[:, 2:] / steep
    distances.view(-1)[hits.rays] = hits.distances
    owners = torch.full((n * side * side,), -1).index_copy_(0, hits.rays, hits.objects)
    points = _planes(layout.eyes) + rays.reshape(3, n, -1) * distances
    shadow, contact = _shadow(layout, points.flatten(1), owners, side)
    sun, ambient, haze = map(_planes, (layout.sun * layout.to_light[:, 2:], layout.ambient, layout.haze))
    light = ambient * (1 - 0.7 * contact.reshape(n, -1)) + sun * (1 - 0.9 * shadow.reshape(n, -1))
    colours = _ground(layout, points, distances) * light
    colours.view(3, -1)[:, hits.rays] = _shade(layout, hits, rays, points.flatten(1), shadow, contact)
    fog = (distances / layout.haze_reach[:, None]) * (distances / layout.haze_reach[:, None])
    colours = colours + fog * fog / (1 + fog * fog) * (haze - colours)
    a, b, c, d = colours.clamp(0, 1).sqrt().reshape(3, n, size, 2, size, 2).permute(3, 5, 1, 0, 2, 4).flatten(0, 1)
    images = (((a + b) + (c + d)) * (255 / 4) + 0.5).to(torch.uint8)
    ids = torch.where(owners < 0, 0, owners % k + 1).to(torch.uint8)
    a, b, c, d = ids.reshape(n, size, 2, size, 2).permute(2, 4, 0, 1, 3).flatten(0, 1)
    low = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    return images, torch.minimum(low, torch.minimum(torch.maximum(a, b), torch.maximum(c, d)))


def all_visible(layout: Layout) -> Bool[Tensor, " n"]:
    """Whether every counted object has enough visible pixels, judged at one size, so that labels do not depend on the size."""
    n, k = layout.solids.shape
    hits = _cast(layout, _rays(layout, REFERENCE_SIZE), REFERENCE_SIZE)
    pixels = torch.bincount(hits.objects, minlength=n * k).reshape(n, k)
    return ((pixels >= VISIBLE_PIXELS) | (torch.arange(k) >= layout.counts[:, None])).all(1)
