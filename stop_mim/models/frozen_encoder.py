"""The interface of encoders for evaluation, whether ours, timm's or of the Hugging Face hub, and their preprocessing."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Float
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError, first_line
from stop_mim.positions import Grid
from stop_mim.records import from_plain

Images = Float[Tensor, "batch 3 height width"]
Pool = Literal["mean", "cls"]
# PIL's numbers of filters, which Hugging Face stores.
FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Preprocessing:
    """How images are resized and cropped to the encoder's size, under timm's names; the defaults are our encoders'."""

    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    """Part of the resized image's short side that the crop keeps."""
    crop_mode: str = "center"
    """center: resize the short side and crop; squash: resize both sides."""

    @classmethod
    def of_timm(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Read timm's `pretrained_cfg`."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if values.get(one.name) is not None})


STANDARD = Preprocessing()


def read_hub_preprocessing(
    values: Mapping[str, Any], origin: str
) -> tuple[ChannelValues, ChannelValues, Preprocessing]:
    """Return mean, standard deviation and resizing of a Hugging Face preprocessor_config.json; empty: our defaults."""
    if not values:
        return IMAGENET_MEAN, IMAGENET_STD, STANDARD
    try:
        mean = from_plain(ChannelValues, values.get("image_mean") or IMAGENET_MEAN, "image_mean")
        std = from_plain(ChannelValues, values.get("image_std") or IMAGENET_STD, "image_std")
        interpolation = FILTERS.get(values.get("resample", 2), "bilinear")
        size, crop = values.get("size"), values.get("crop_size")
        if not isinstance(size, Mapping) or "shortest_edge" not in size:
            return mean, std, Preprocessing(interpolation, crop_mode="squash")
        kept = crop["height"] / size["shortest_edge"] if values.get("do_center_crop") and crop else 1.0
    except (InputError, KeyError, TypeError, ZeroDivisionError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"The preprocessing in {origin} cannot be read ({reason}): restore it.") from error
    return mean, std, Preprocessing(interpolation, kept)


class FrozenEncoder(nn.Module, ABC):
    """An encoder of images: a call returns normed patch tokens (B, N, D), `embed` pooled features (B, layers · D)."""

    pool: Pool = "mean"
    """What `embed` returns of a layer: the mean of its patches, or its class token."""
    pools: tuple[Pool, ...]
    """The values that `pool` may have, the usual one first."""
    preprocessing = STANDARD
    guessed_heads = False
    """Whether the number of heads was not stored with the weights."""

    def __init__(
        self,
        dim: int,
        depth: int,
        grid: Grid,
        patch_size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.dim, self.depth, self.grid, self.patch_size = dim, depth, grid, patch_size
        self.image_size = (grid[0] * patch_size[0], grid[1] * patch_size[1])
        self.mean: ChannelValues = (mean[0], mean[1], mean[2])
        self.std: ChannelValues = (std[0], std[1], std[2])

    @abstractmethod
    def last_layers(self, images: Images, layers: int) -> list[Float[Tensor, "batch n_tokens dim"]]:
        """Return the normed tokens of the last layers, prefix tokens included; the last layer comes last."""

    def embed(self, images: Images, layers: int = 1) -> Float[Tensor, "batch layers_times_dim"]:
        """Return normed tokens of the last layers, pooled as `pool` says and concatenated; the last layer comes last."""
        if not 1 <= layers <= self.depth:
            raise InputError(f"layers is {layers}: this encoder has {self.depth} layers, choose 1 to {self.depth}.")
        found = self.last_layers(images, layers)
        if self.pool == "cls":
            return torch.cat([tokens[:, 0] for tokens in found], dim=1)
        first = found[0].shape[1] - math.prod(self.grid_of(images))
        return torch.cat([tokens[:, first:].mean(1) for tokens in found], dim=1)

    def grid_of(self, images: Images) -> Grid:
        """Return rows and columns of patches of images of this size."""
        height, width = images.shape[-2:]
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise InputError(
                f"Images of {height}x{width} pixels cannot be cut into patches of {self.patch_size[0]}x{self.patch_size[1]}: "
                "resize them to multiples of the patch size."
            )
        return height // self.patch_size[0], width // self.patch_size[1]

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """The preprocessing: from a PIL image to a normalised tensor (3, H, W) of the encoder's image size, as timm's."""
        how = asdict(self.preprocessing)
        return create_transform((3, *self.image_size), mean=self.mean, std=self.std, **how)
