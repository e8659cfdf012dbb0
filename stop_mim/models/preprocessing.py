"""From a PIL image to what an encoder takes: resize, crop, normalise, as timm does it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from timm.data.transforms_factory import create_transform
from torch import Tensor

# PIL's numbers of filters, which Hugging Face stores.
FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}


class Preprocessing(NamedTuple):
    """How images of other sizes are brought to the encoder's, under timm's names; the default is that of our encoders."""

    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    """Part of the resized image's short side that the crop keeps."""
    crop_mode: str = "center"
    """center: resize the short side and crop; squash: resize both sides."""

    @classmethod
    def of_timm(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Return the one of timm's `pretrained_cfg`."""
        return cls(**{name: values[name] for name in cls._fields if values.get(name) is not None})

    @classmethod
    def of_hub(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Return the one of a Hugging Face preprocessor_config.json."""
        interpolation = FILTERS.get(values.get("resample", 2), "bilinear")
        size, crop = values.get("size"), values.get("crop_size")
        if isinstance(size, Mapping) and "shortest_edge" in size:
            kept = crop["height"] / size["shortest_edge"] if values.get("do_center_crop") and crop else 1.0
            return cls(interpolation, kept)
        return cls(interpolation, crop_mode="squash")


STANDARD = Preprocessing()


def make_transform(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], how: Preprocessing
) -> Callable[[Any], Tensor]:
    """Return a function from a PIL image to a tensor (3, height, width)."""
    return create_transform((3, *size), mean=tuple(mean), std=tuple(std), **how._asdict())
