"""What scenes are drawn from: solids, places, walks, colours, ground, light and camera, all from random numbers."""

from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

FEWEST_OBJECTS, MOST_OBJECTS = 3, 10
HALF_VIEW = 0.31
NEAREST, FARTHEST = (7.5, 10.5), 14.5
TEXELS = 128
CLEAR_FRAMES = 48

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


@dataclass(frozen=True)
class Layout:
    """What stands where, under which light, seen from where: all that a picture of any size is rendered from."""

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
        """Only these scenes, in this order; one may be asked for many times."""
        return Layout(**{field.name: getattr(self, field.name)[scenes] for field in fields(self)})


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
    """Cosines and sines; by way of float64, as float32 ones may differ in the last bit with the tensor's length."""
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
    """Everything but the counts and places: all ten objects are drawn, so nothing here can tell the count."""
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
    """Where each object's centre is when it stands on the ground at a distance from the eye and off its middle."""
    height = layout.extents[..., 2].reshape(*layout.extents.shape[:2], *[1] * (distances.ndim - 2))
    drop = layout.eyes[:, 2].reshape(-1, *[1] * (distances.ndim - 1)) - height
    along = (distances**2 - drop**2).sqrt()
    return torch.stack((along * bearings.sin(), along * bearings.cos(), height.expand_as(along)), -1)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Products along the last axis, of three, summed in one order whatever the shape."""
    x, y, z = (a * b).unbind(-1)
    return x + y + z


def project(layout: Layout, points: Tensor) -> Tensor:
    """Points (n, ..., 3) to picture coordinates (n, ..., 2), both from -1 to 1 within the picture."""
    middle = [1] * (points.ndim - 2)
    seen = points - layout.eyes.reshape(-1, *middle, 3)
    right, down, forward = (inner(seen, axis.reshape(-1, *middle, 3)) for axis in layout.axes.unbind(1))
    return torch.stack((right, down), -1) / (forward.clamp(min=0.5) * HALF_VIEW)[..., None]


def draw_places(rng: np.random.Generator, layout: Layout, nearest: Tensor, tries: int = 24) -> Tensor:
    """Centres, object by object: the first of some random spots that is clear on the ground and in the picture."""
    n, k = layout.solids.shape
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
    """Walks that turn back at both ends."""
    span = high - low
    phase = (values - low) % (2 * span)
    return low + torch.minimum(phase, 2 * span - phase)


def draw_walks(rng: np.random.Generator, layout: Layout, frames: int, tries: int = 32) -> Tensor:
    """Centres (frames, k, 3): of some random walks the first in which nothing counted runs into another."""
    k, time = layout.solids.shape[1], torch.arange(max(frames, CLEAR_FRAMES))[:, None]
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
