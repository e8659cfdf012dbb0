"""Drawn scenes as a dataset."""

from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data import scenes
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.sources import SOURCES, SourceKind

_DEFAULTS = {"count": 10_000, "size": 64, "seed": 0}

# Added to the seed for every split but the training split: seeds that a user gives are smaller.
_TEST_SEED_OFFSET = 2**31


@SOURCES.register("scenes")
class SceneKind(SourceKind):
    """Scenes that are drawn when they are first used."""

    help = "scenes[:count=…,size=…,seed=…]"

    @classmethod
    def matches(cls, name: str) -> bool:
        return name.partition(":")[0] == "scenes"

    @classmethod
    def open(cls, name: str, split: str) -> ImageSource:
        """Draw the scenes; other splits than train are a fifth of the size."""
        chosen = scenes.parse_options(name.partition(":")[2], _DEFAULTS)
        if split != "train":
            chosen |= {"count": max(1, chosen["count"] // 5), "seed": chosen["seed"] + _TEST_SEED_OFFSET}
        return SceneSource(**chosen)


class SceneSource(ImageSource):
    """Drawn scenes, all in memory, labelled with the count of objects and the distance of the nearest."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.scenes, self.seed = scenes.load_scenes(count, size, seed), seed
        labels = {"count": self.scenes.counts.numpy(), "distance": self.scenes.nearest_distances.numpy()}
        super().__init__(f"scenes:count={count},size={size},seed={seed}", labels)

    def __len__(self) -> int:
        return len(self.scenes.images)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        self.check_index(index)
        return self.scenes.images[index]

    def enlarged(self, index: int, side: int) -> UInt8[Tensor, "3 height width"]:
        return scenes.render_scenes(1, side, self.seed, index).images[0]

    def size(self, index: int) -> tuple[int, int]:
        return self.scenes.images.shape[2], self.scenes.images.shape[3]

    def describe(self, index: int) -> str:
        return f"{self.name}#{index}"

    def image_name(self, index: int) -> str:
        return f"scene-{index}"

    def fingerprint(self) -> str:
        return digest([self.name, self.scenes.images[0].numpy().tobytes()])

    def stacked(self) -> UInt8[Tensor, "n 3 height width"]:
        return self.scenes.images
