"""Views: random crops and colours, or the centre crop of evaluation. Random draws are a function of (seed, epoch, image).

Everything works on batches on any device and never waits for the device, because shapes do not depend on data. Each
transform equals torchvision's on one image.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int, UInt8
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, resize

from stop_mim.errors import InputError
from stop_mim.options import AugmentConfig
from stop_mim.seeds import derive_seed

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
STORED_TO_USED = 8 / 7
"""Ratio of the size at which images are stored, or resized before a centre crop, to the size of the crop: 256 / 224."""

Pixels = Float[Tensor, "b c h w"] | UInt8[Tensor, "b c h w"]
Draws = Float64[Tensor, "b draws"]
Bounds = tuple[float, float]
ChannelValues = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]
Retouch = Callable[[UInt8[Tensor, "h w 3"], int], UInt8[Tensor, "h w 3"]]
"""Changes one cropped image on the CPU, with the random numbers of a seed; can be pickled."""

# The columns of an image's draws: two for each attempt to crop, then one for each name here.
_ATTEMPTS = 10
_TOP, _LEFT, _FLIP, _JITTER, _BRIGHTNESS, _CONTRAST, _SATURATION, _GREY, _BLUR, _BLUR_SIGMA = range(20, 30)
N_DRAWS = 32


def draw(seed: int, epoch: int, images: Int[Tensor, " b"]) -> Draws:
    """Return uniform numbers in [0, 1) for each image: its part of the SplitMix64 sequence of the seed and the epoch."""
    counters = images.long()[:, None] * N_DRAWS + torch.arange(1, N_DRAWS + 1, device=images.device)
    state = counters * _signed(0x9E3779B97F4A7C15) + derive_seed(seed, "draws", epoch)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(state: Int[Tensor, "b draws"], bits: int) -> Int[Tensor, "b draws"]:
    # A right shift of unsigned numbers: torch has none.
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def crop_boxes(sizes: Int[Tensor, "b 2"], draws: Draws, scale: Bounds, ratio: Bounds) -> Int[Tensor, "b 4"]:
    """Return (top, left, height, width) for each (height, width), distributed as torchvision's RandomResizedCrop."""
    known = sizes.double()
    area = known.prod(dim=1, keepdim=True) * _between(scale, draws[:, 0 : 2 * _ATTEMPTS : 2])
    aspect = _between((math.log(ratio[0]), math.log(ratio[1])), draws[:, 1 : 2 * _ATTEMPTS : 2]).exp()
    candidates = torch.stack([area / aspect, area * aspect], dim=2).sqrt().round()
    fits = ((candidates >= 1) & (candidates <= known[:, None])).all(dim=2)
    first = fits.to(torch.uint8).argmax(dim=1)
    crops = candidates.take_along_dim(first[:, None, None], dim=1)[:, 0]
    # The product may round up to the bound, which would place the crop one pixel outside.
    corners = torch.minimum((draws[:, _TOP : _LEFT + 1] * (known - crops + 1)).floor(), known - crops)
    heights, widths = known.unbind(1)
    central = torch.stack([widths / ratio[0], heights * ratio[1]], dim=1).round().minimum(known).clamp(min=1)
    centred = torch.cat([((known - central) / 2).floor(), central], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), torch.cat([corners, crops], dim=1), centred).to(sizes.dtype)


def crop_and_resize(
    images: Pixels,
    boxes: Int[Tensor, "b 4"],
    size: tuple[int, int],
    flip: Bool[Tensor, " b"] | None = None,
    interpolation: Interpolation = "bilinear",
) -> Float[Tensor, "b c h2 w2"]:
    """Cut each image's (top, left, height, width), which must lie inside it, and resize it with antialiasing.

    Values keep their scale: bytes become floats in 0..255, not rounded. Images in `flip` are mirrored left to right.
    """
    rows = _resize_weights(boxes[:, 0::2], images.shape[2], size[0], None, interpolation)
    columns = _resize_weights(boxes[:, 1::2], images.shape[3], size[1], flip, interpolation)
    resized = _apply_separable(images, rows, columns)
    # A cubic overshoots at edges; bytes cannot.
    return resized if interpolation == "bilinear" or images.is_floating_point() else resized.clamp_(0, 255)


def _resize_weights(
    spans: Int[Tensor, "b 2"],
    length: int,
    out_length: int,
    flip: Bool[Tensor, " b"] | None,
    interpolation: Interpolation,
) -> Float[Tensor, "b out_length length"]:
    start, extent = spans[:, :1], spans[:, 1:]
    step = extent / out_length
    centres = (torch.arange(out_length, device=spans.device) + 0.5) * step
    if flip is not None:
        centres = torch.where(flip[:, None], centres.flip(1), centres)
    # When shrinking, the filter covers all input pixels of an output pixel.
    width = step.clamp(min=1)[:, :, None]
    positions = torch.arange(length, device=spans.device) - start
    inside = (positions >= 0) & (positions < extent)
    distances = ((positions + 0.5)[:, None] - centres[:, :, None]).div_(width).abs_()
    weights = (1 - distances).clamp_(min=0) if interpolation == "bilinear" else _cubic(distances)
    weights = weights.mul_(inside[:, None])
    return weights.div_(weights.sum(dim=2, keepdim=True))


def _cubic(distances: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the weights of Pillow's bicubic filter: a convolution kernel with a = -1/2 that ends at 2."""
    near = (1.5 * distances - 2.5) * distances.square() + 1
    far = ((2.5 - 0.5 * distances) * distances - 4) * distances + 2
    return torch.where(distances < 1, near, far) * (distances < 2)


def _apply_separable(
    images: Pixels, rows: Float[Tensor, "b h2 h"], columns: Float[Tensor, "b w2 w"]
) -> Float[Tensor, "b c h2 w2"]:
    batch, channels, height, width = images.shape
    # With channels next to columns, both are plain batched products, without a copy of the weights per channel.
    lines = images.permute(0, 2, 1, 3).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    # In bf16 (autocast) the products would keep only 8 bits.
    with torch.autocast(images.device.type, enabled=False):
        tall = rows @ lines.view(batch, height, channels * width)
        wide = tall.view(batch, rows.shape[1] * channels, width) @ columns.mT
    return wide.view(batch, rows.shape[1], channels, columns.shape[1]).permute(0, 2, 1, 3).contiguous()


def blur_kernel_size(length: int) -> int:
    """Return the taps of the blur along an axis of `length` pixels: a tenth of it as in SimCLR, odd, at least 3."""
    return max(3, length // 10 | 1)


def gaussian_blur(images: Float[Tensor, "b c h w"], sigmas: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Blur each image with its own standard deviation, reflecting at the border; 0 leaves an image as it is."""
    rows = _blur_weights(sigmas, images.shape[2])
    columns = _blur_weights(sigmas, images.shape[3])
    return torch.where(_per_image(sigmas > 0), _apply_separable(images, rows, columns), images)


def _blur_weights(sigmas: Float[Tensor, " b"], length: int) -> Float[Tensor, "b length length"]:
    taps = blur_kernel_size(length)
    offsets = torch.arange(taps, device=sigmas.device) - taps // 2
    # The bound avoids 0 / 0 for a sigma of 0, whose result is not used.
    kernels = (-0.5 * (offsets / sigmas.clamp(min=1e-6)[:, None]).square()).softmax(dim=1)
    # Blurring every unit vector gives the matrix of the blur, borders included.
    units = torch.eye(length, device=sigmas.device)[None]
    windows = functional.pad(units, (taps // 2, taps // 2), mode="reflect")[0].unfold(1, taps, 1)
    with torch.autocast(sigmas.device.type, enabled=False):
        return torch.einsum("jik,bk->bij", windows, kernels)


def _luminance(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1 h w"]:
    red, green, blue = images.split(1, dim=1)
    return red * 0.2989 + green * 0.587 + blue * 0.114


def adjust_colours(
    images: Float[Tensor, "b 3 h w"],
    brightness: Float[Tensor, " b"],
    contrast: Float[Tensor, " b"],
    saturation: Float[Tensor, " b"],
) -> Float[Tensor, "b 3 h w"]:
    """Change brightness, contrast and saturation of images in 0..1 by these factors, in this order."""
    images = (images * _per_image(brightness)).clamp_(0, 1)
    images = _blend(images, _luminance(images).mean(dim=(1, 2, 3), keepdim=True), contrast)
    return _blend(images, _luminance(images), saturation)


def _blend(images: Tensor, base: Tensor, factor: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    weight = _per_image(factor)
    return (images * weight + base * (1 - weight)).clamp_(0, 1)


def normalise(
    images: Pixels, mean: ChannelValues = IMAGENET_MEAN, std: ChannelValues = IMAGENET_STD
) -> Float[Tensor, "b c h w"]:
    """Normalise images (bytes, or floats in 0..1) to zero mean and unit standard deviation in each channel."""
    white = 1.0 if images.is_floating_point() else 255.0
    factors = _per_channel([1 / (white * deviation) for deviation in std], images.device)
    shifts = _per_channel([-centre / deviation for centre, deviation in zip(mean, std, strict=True)], images.device)
    return torch.addcmul(shifts, images.float(), factors)


def resize_batch(images: UInt8[Tensor, "b 3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "b 3 h2 w2"]:
    """Resize whole images with antialiased bilinear interpolation."""
    _check_size(size)
    if images.shape[2:] == size:
        return images
    resized = functional.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


@dataclass(eq=False)
class RandomCrop:
    """Random resized crop, flip, colour jitter, grey, blur; a stage of probability 0 is skipped.

    The order of the jitter is fixed (torchvision shuffles it): drawing it on the device would mean computing every order.
    """

    config: AugmentConfig
    size: tuple[int, int]
    mean: ChannelValues = IMAGENET_MEAN
    std: ChannelValues = IMAGENET_STD
    interpolation: Interpolation = "bilinear"
    retouch: Retouch | None = None
    """Applied to the cropped image before the flip; such images are always streamed and decoded by workers."""

    def __post_init__(self) -> None:
        _check_size(self.size)

    def boxes(self, sizes: Int[Tensor, "b 2"], draws: Draws) -> Int[Tensor, "b 4"]:
        """Return the random crop of images of these sizes."""
        return crop_boxes(sizes, draws, self.config.crop_scale, self.config.crop_ratio)

    def of_whole(self, images: UInt8[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h2 w2"]:
        """Return the view of whole images."""
        count, _, height, width = images.shape
        # Filled on the device, as in `_per_channel`.
        sizes = torch.stack([torch.full((count,), side, device=images.device) for side in (height, width)], dim=1)
        boxes = self.boxes(sizes, draws)
        flip = _choose(self.config.flip_probability, draws[:, _FLIP])
        crops = crop_and_resize(images, boxes, self.size, flip, self.interpolation)
        return self._recolour(crops.div_(255), draws)

    def of_cut(self, images: UInt8[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h w"]:
        """Return the view of images that are already cropped and resized."""
        flip = _choose(self.config.flip_probability, draws[:, _FLIP])
        if flip is not None:
            images = torch.where(_per_image(flip), images.flip(3), images)
        return self._recolour(images.float().div_(255), draws)

    def _recolour(self, images: Float[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h w"]:
        config = self.config
        jittered = _choose(config.jitter_probability, draws[:, _JITTER])
        if jittered is not None:
            images = torch.where(_per_image(jittered), self._jitter(images, draws), images)
        grey = _choose(config.grey_probability, draws[:, _GREY])
        if grey is not None:
            images = torch.where(_per_image(grey), _luminance(images), images)
        blurred = _choose(config.blur_probability, draws[:, _BLUR])
        if blurred is not None:
            images = gaussian_blur(images, _between(config.blur_sigma, draws[:, _BLUR_SIGMA]).float() * blurred)
        return normalise(images, self.mean, self.std)

    def _jitter(self, images: Float[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h w"]:
        config, chances = self.config, draws.float()
        brightness, contrast, saturation = (
            _between((max(0.0, 1 - reach), 1 + reach), chances[:, column])
            for reach, column in (
                (config.jitter_brightness, _BRIGHTNESS),
                (config.jitter_contrast, _CONTRAST),
                (config.jitter_saturation, _SATURATION),
            )
        )
        return adjust_colours(images, brightness, contrast, saturation)


class WholeImage(RandomCrop):
    """The whole image, resized, with the flip and the colours of `RandomCrop`."""

    def boxes(self, sizes: Int[Tensor, "b 2"], draws: Draws) -> Int[Tensor, "b 4"]:
        """Return the whole of each image."""
        return torch.cat([torch.zeros_like(sizes), sizes], dim=1)


@dataclass(eq=False)
class TestView:
    """The view for evaluation, without randomness: resize the short side to `resize_to` and cut out the centre.

    Without `resize_to` the whole image is resized.
    """

    __test__ = False
    retouch = None

    size: tuple[int, int]
    resize_to: int | None = None
    mean: ChannelValues = IMAGENET_MEAN
    std: ChannelValues = IMAGENET_STD
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.size)

    def cut(self, images: UInt8[Tensor, "*b 3 h w"]) -> UInt8[Tensor, "*b 3 h2 w2"]:
        """Resize and cut one image or a batch, on its device."""
        size = list(self.size) if self.resize_to is None else [self.resize_to]
        resized = resize(images, size, InterpolationMode(self.interpolation), antialias=True)
        return resized if self.resize_to is None else center_crop(resized, list(self.size))

    def of_whole(self, images: UInt8[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h2 w2"]:
        """Return the view of whole images."""
        return self.of_cut(self.cut(images), draws)

    def of_cut(self, images: UInt8[Tensor, "b 3 h w"], draws: Draws) -> Float[Tensor, "b 3 h w"]:
        """Return the view of images that are already cropped and resized."""
        return normalise(images, self.mean, self.std)


View = RandomCrop | TestView


def _between(bounds: Bounds, chances: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return bounds[0] + (bounds[1] - bounds[0]) * chances


def _choose(probability: float, chances: Float[Tensor, " b"]) -> Bool[Tensor, " b"] | None:
    return chances < probability if probability > 0 else None


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _per_channel(values: Sequence[float], device: torch.device) -> Float[Tensor, "c 1 1"]:
    # Filled on the device: a tensor made from a list is copied to it, and the host waits for the copy.
    return torch.cat([torch.full((1, 1, 1), value, device=device) for value in values])


def _check_size(size: tuple[int, int]) -> None:
    if min(size) < 2:
        raise InputError(f"size is {size}: give a height and a width of at least 2 pixels.")
