"""Datasets of procedural scenes: 3 to 10 solids on a textured ground, labelled with their count and the nearest distance."""

from collections.abc import Mapping

from jaxtyping import UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor

from stop_mim.data.cache import cached_file, damage_named
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.scenes import RENDERER_VERSION, Scenes, render_scenes
from stop_mim.data.sources import source
from stop_mim.errors import InputError

SMALLEST_SIZE = 32
# All scenes of a dataset are held in memory: 64 GiB.
MOST_PIXELS = 2**34

_DEFAULTS = {"count": 10_000, "size": 64, "seed": 0}
# Added to the seed for every split but the training split: seeds that a user gives are smaller.
_TEST_SEED_OFFSET = 2**31


@source("scenes", help="scenes[:count=…,size=…,seed=…]", matches=lambda name: name.partition(":")[0] == "scenes")
def open_scenes(name: str, split: str) -> ImageSource:
    """Render scenes, or take them from the cache; splits other than train have a fifth of the images."""
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
        return self.scenes.images[index]

    def enlarged(self, index: int, side: int) -> UInt8[Tensor, "3 height width"]:
        return render_scenes(1, side, self.seed, index).images[0]

    def image_name(self, index: int) -> str:
        return f"scene-{index}"

    def fingerprint(self, times: bool = True) -> str:
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


def load_scenes(count: int, size: int = 64, seed: int = 0) -> Scenes:
    """Return `render_scenes`, through the cache."""
    name = f"scenes/renderer{RENDERER_VERSION}-seed{seed}-size{size}-count{count}.safetensors"
    path = cached_file(name, lambda draft: save_file(vars(render_scenes(count, size, seed)), draft))
    with damage_named(path):
        return Scenes(**load_file(path))
