"""Groups and choices of options that the command line shares with modules that need torch. This one does not.

The docstring of a field is its help on the command line.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, FRACTION, Checked, Interval, NotWith, Number, OnlyWith

ApplyTo = Literal["masked", "context", "both", "none"]
Convention = Literal["paper", "std", "release"]
LoaderMode = Literal["auto", "resident", "streaming"]
Decode = Literal["auto", "cpu", "gpu"]
Compat = Literal["corrected", "release", "paper-text"]
Range = tuple[float, float]

MULTIBLOCK_ONLY = OnlyWith("masks.kind", ("multiblock",))
NOT_BLOCKWISE, NOT_RANDOM = NotWith("masks.kind", ("random", "blockwise")), NotWith("masks.kind", ("random",))
NOT_MULTIBLOCK, NOT_RELEASED = NotWith("masks.kind", ("multiblock",)), NotWith("masks.compat", ("release",))


@dataclass(frozen=True)
class MaskConfig(Checked, group="masks"):
    """Which patches are context and which are targets."""

    kind: str = "multiblock"
    """multiblock (I-JEPA's blocks), random (uniform, MAE) or blockwise (rectangles that are one target, data2vec)."""
    n_blocks: Annotated[int, ABOVE_ZERO, NOT_BLOCKWISE] = 4
    """Target blocks per image."""
    target_scale: Annotated[Range, Interval(1.0), NOT_RANDOM] = (0.15, 0.2)
    """Smallest and largest area of a target block, or of a blockwise rectangle, as a fraction of the image."""
    target_aspect: Annotated[Range, Interval(), NOT_RANDOM] = (0.75, 1.5)
    """Smallest and largest height over width of a target block, or of a blockwise rectangle."""
    context_scale: Annotated[Range, Interval(1.0), NOT_BLOCKWISE] = (0.85, 1.0)
    """Smallest and largest area of the context block, before the targets are removed from it."""
    context_aspect: Annotated[Range, Interval(), NOT_BLOCKWISE] = (1.0, 1.0)
    """Smallest and largest height over width of the context block."""
    target_tokens: Annotated[int | None, ABOVE_ZERO, MULTIBLOCK_ONLY, NOT_RELEASED] = None
    """Patches kept of each target block; by default as many as nine blocks in ten have."""
    context_tokens: Annotated[int | None, ABOVE_ZERO, MULTIBLOCK_ONLY, NOT_RELEASED] = None
    """Patches kept of each context; by default as many as nineteen contexts in twenty have."""
    mask_ratio: Annotated[float, Number("give a number above 0 and below 1", above=0, below=1), NOT_MULTIBLOCK] = 0.75
    """Fraction of the patches that random and blockwise masks make targets."""
    compat: Annotated[Literal["release"] | None, MULTIBLOCK_ONLY] = None
    """release: sample as the released I-JEPA and StoP code does, with its defects."""


@dataclass(frozen=True)
class AugmentConfig(Checked, group="augment"):
    """Augmentation of training images."""

    crop_scale: Annotated[Range, Interval(at_most=1.0)] = (0.3, 1.0)
    """Smallest and largest area of a crop, as a fraction of the image."""
    crop_ratio: Annotated[Range, Interval()] = (3 / 4, 4 / 3)
    """Smallest and largest width over height of a crop."""
    flip_probability: Annotated[float, FRACTION] = 0.0
    """Probability that an image is mirrored left to right."""
    blur_probability: Annotated[float, FRACTION] = 0.0
    """Probability that an image is blurred."""
    blur_sigma: Annotated[Range, Interval()] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels."""
    grey_probability: Annotated[float, FRACTION] = 0.0
    """Probability that an image becomes grey."""
    jitter_probability: Annotated[float, FRACTION] = 0.0
    """Probability that an image's brightness, contrast and saturation are changed, in this order."""
    jitter_brightness: Annotated[float, AT_LEAST_ZERO] = 0.4
    """Largest relative change of brightness."""
    jitter_contrast: Annotated[float, AT_LEAST_ZERO] = 0.4
    """Largest relative change of contrast."""
    jitter_saturation: Annotated[float, AT_LEAST_ZERO] = 0.4
    """Largest relative change of saturation."""
