"""Batched augmentation on the training device: every image of a batch gets its own random parameters.

Nothing here waits for the device (shapes never depend on data), and every random number comes from the generator
that is passed in, drawn in a fixed order, so a run can be repeated. Each step equals torchvision's on one image.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from stop_mim.errors import InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Pixels = Float[Tensor, "b c h w"] | UInt8[Tensor, "b c h w"]
Bounds = tuple[float, float]
ChannelValues = tuple[float, float, float]
Filter = Callable[[Tensor], Tensor]

JITTER_ORDER = BRIGHTNESS, CONTRAST, SATURATION, HUE = (0, 1, 2, 3)

_CROP_ATTEMPTS = 10
_GREY_WEIGHTS = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class AugmentConfig:
    """How training images are changed; the defaults are the paper's recipe, a random resized crop and nothing else."""

    crop_scale: tuple[float, float] = (0.3, 1.0)
    """Smallest and largest area of a crop, as a fraction of the image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width over height of a crop."""
    flip_probability: float = 0.0
    """Chance that an image is mirrored left to right."""
    blur_probability: float = 0.0
    """Chance that an image is blurred."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels."""
    grey_probability: float = 0.0
    """Chance that an image loses its colours."""
    jitter_probability: float = 0.0
    """Chance that an image's brightness, contrast, saturation and hue are changed, in this order."""
    jitter_brightness: float = 0.4
    """Largest relative change of brightness."""
    jitter_contrast: float = 0.4
    """Largest relative change of contrast."""
    jitter_saturation: float = 0.4
    """Largest relative change of saturation."""
    jitter_hue: float = 0.1
    """Largest shift of hue, in turns of the colour wheel (0.5 reaches the opposite colour)."""

    def __post_init__(self) -> None:
        _check_range("augment.crop_scale", self.crop_scale, highest=1.0)
        _check_range("augment.crop_ratio", self.crop_ratio)
        _check_range("augment.blur_sigma", self.blur_sigma)
        for name in ("flip_probability", "blur_probability", "grey_probability", "jitter_probability"):
            _check_number(f"augment.{name}", getattr(self, name), highest=1.0)
        for name in ("jitter_brightness", "jitter_contrast", "jitter_saturation"):
            _check_number(f"augment.{name}", getattr(self, name))
        _check_number("augment.jitter_hue", self.jitter_hue, highest=0.5)


def sample_crop_boxes(
    image_sizes: Int[Tensor, "b 2"], scale: Bounds, ratio: Bounds, generator: torch.Generator | None = None
) -> Int[Tensor, "b 4"]:
    """Draw one (top, left, height, width) for each (height, width), distributed as torchvision's RandomResizedCrop."""
    _check_range("scale", scale, highest=1.0)
    _check_range("ratio", ratio)
    sizes = image_sizes.float()
    candidates = _candidate_crops(sizes, scale, ratio, generator)
    fits = ((candidates >= 1) & (candidates <= sizes[:, None])).all(dim=2)
    first = fits.to(torch.uint8).argmax(dim=1)
    crops = candidates.take_along_dim(first[:, None, None], dim=1)[:, 0]
    chances = _uniform(crops.shape, crops.device, generator)
    # A float product may round up to the bound itself, which would put the crop one pixel outside.
    corners = torch.minimum((chances * (sizes - crops + 1)).floor(), sizes - crops)
    central = _central_crops(sizes, ratio)
    found = fits.any(dim=1, keepdim=True)
    boxes = torch.where(found, torch.cat([corners, crops], 1), torch.cat([((sizes - central) / 2).floor(), central], 1))
    return boxes.to(image_sizes.dtype)


def _candidate_crops(
    sizes: Float[Tensor, "b 2"], scale: Bounds, ratio: Bounds, generator: torch.Generator | None
) -> Float[Tensor, "b attempts 2"]:
    chances = _uniform((len(sizes), _CROP_ATTEMPTS, 2), sizes.device, generator)
    area = sizes.prod(dim=1, keepdim=True) * _between(scale, chances[..., 0])
    aspect = _between((math.log(ratio[0]), math.log(ratio[1])), chances[..., 1]).exp()
    return torch.stack([area / aspect, area * aspect], dim=2).sqrt().round()


def _central_crops(sizes: Float[Tensor, "b 2"], ratio: Bounds) -> Float[Tensor, "b 2"]:
    heights, widths = sizes.unbind(1)
    return torch.stack([widths / ratio[0], heights * ratio[1]], dim=1).round().minimum(sizes).clamp(min=1)


def scale_boxes(
    boxes: Int[Tensor, "b 4"], original_sizes: Int[Tensor, "b 2"], stored_size: tuple[int, int]
) -> Int[Tensor, "b 4"]:
    """Move boxes of original images to copies squashed to `stored_size`; a box keeps at least one pixel each way."""
    stored = _repeat_size(stored_size, len(boxes), boxes.device)
    zoom = stored / original_sizes
    starts = torch.minimum((boxes[:, :2] * zoom).round(), stored - 1)
    ends = torch.maximum(((boxes[:, :2] + boxes[:, 2:]) * zoom).round(), starts + 1)
    return torch.cat([starts, ends - starts], dim=1).to(boxes.dtype)


def crop_and_resize(
    images: Pixels,
    boxes: Int[Tensor, "b 4"],
    size: tuple[int, int],
    flip: Bool[Tensor, " b"] | None = None,
    interpolation: str = "bilinear",
) -> Float[Tensor, "b c h2 w2"]:
    """Cut each image's (top, left, height, width), which must lie inside it, and resize it with antialiasing.

    Values keep their scale (bytes become floats in 0..255, not rounded); chosen images are mirrored left to right.
    """
    if interpolation not in _FILTERS:
        raise InputError(f"interpolation is '{interpolation}': choose one of {', '.join(_FILTERS)}.")
    _check_size(size)
    weigh = _FILTERS[interpolation]
    rows = _resize_weights(boxes[:, 0::2], images.shape[2], size[0], None, weigh)
    columns = _resize_weights(boxes[:, 1::2], images.shape[3], size[1], flip, weigh)
    return _apply_separable(images, rows, columns)


def _resize_weights(
    spans: Int[Tensor, "b 2"], length: int, out_length: int, flip: Bool[Tensor, " b"] | None, weigh: Filter
) -> Float[Tensor, "b out_length length"]:
    start, extent = spans[:, :1], spans[:, 1:]
    step = extent / out_length
    centres = (torch.arange(out_length, device=spans.device) + 0.5) * step
    if flip is not None:
        centres = torch.where(flip[:, None], centres.flip(1), centres)
    # Shrinking widens the filter so that it covers all that falls into one output pixel.
    width = step.clamp(min=1)[:, :, None]
    positions = torch.arange(length, device=spans.device) - start
    inside = (positions >= 0) & (positions < extent)
    distances = ((positions + 0.5)[:, None] - centres[:, :, None]).div_(width).abs_()
    weights = weigh(distances).mul_(inside[:, None])
    return weights.div_(weights.sum(dim=2, keepdim=True))


def _triangle(distances: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return (1 - distances).clamp_(min=0)


def _cubic(distances: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    # Keys' cubic with a = -0.5, which PyTorch takes when it antialiases (and -0.75 when it does not).
    near = (1.5 * distances - 2.5) * distances.square() + 1
    far = ((-0.5 * distances + 2.5) * distances - 4) * distances + 2
    return torch.where(distances < 1, near, far * (distances < 2))


_FILTERS: dict[str, Filter] = {"bilinear": _triangle, "bicubic": _cubic}


def _apply_separable(
    images: Pixels, rows: Float[Tensor, "b h2 h"], columns: Float[Tensor, "b w2 w"]
) -> Float[Tensor, "b c h2 w2"]:
    batch, channels, height, width = images.shape
    # With the channels beside the columns both products are plain batched ones, and no matrix is copied per channel.
    lines = images.permute(0, 2, 1, 3).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    # Under autocast the products would keep eight bits, as few as the pixels have.
    with torch.autocast(images.device.type, enabled=False):
        tall = rows @ lines.view(batch, height, channels * width)
        wide = tall.view(batch, -1, width) @ columns.mT
    return wide.view(batch, rows.shape[1], channels, -1).permute(0, 2, 1, 3).contiguous()


def blur_kernel_size(length: int) -> int:
    """Taps of the blur along an axis of `length` pixels: a tenth of it as in SimCLR, odd, at least three."""
    return max(3, length // 10 | 1)


def gaussian_blur(images: Float[Tensor, "b c h w"], sigmas: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Blur each image with its own standard deviation, reflecting at the border; 0 leaves an image as it is."""
    _check_size((images.shape[2], images.shape[3]))
    rows = _blur_weights(sigmas, images.shape[2])
    columns = _blur_weights(sigmas, images.shape[3])
    return torch.where(_per_image(sigmas > 0), _apply_separable(images, rows, columns), images)


def _blur_weights(sigmas: Float[Tensor, " b"], length: int) -> Float[Tensor, "b length length"]:
    taps = blur_kernel_size(length)
    offsets = torch.arange(taps, device=sigmas.device) - taps // 2
    # The bound only keeps a sigma of 0 from dividing 0 by 0: its result is thrown away.
    kernels = (-0.5 * (offsets / sigmas.clamp(min=1e-6)[:, None]).square()).softmax(dim=1)
    # Blurring every unit vector gives the matrix of the blur, borders included.
    units = torch.eye(length, device=sigmas.device)[None]
    windows = functional.pad(units, (taps // 2, taps // 2), mode="reflect")[0].unfold(1, taps, 1)
    with torch.autocast(sigmas.device.type, enabled=False):
        return torch.einsum("jik,bk->bij", windows, kernels)


def to_grey(images: Float[Tensor, "b 3 h w"], chosen: Bool[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    """Replace the three channels of the chosen images by their luminance."""
    return torch.where(_per_image(chosen), _luminance(images), images)


def _luminance(images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1 h w"]:
    red, green, blue = images.split(1, dim=1)
    return red * _GREY_WEIGHTS[0] + green * _GREY_WEIGHTS[1] + blue * _GREY_WEIGHTS[2]


def adjust_colours(
    images: Float[Tensor, "b 3 h w"],
    brightness: Float[Tensor, " b"],
    contrast: Float[Tensor, " b"],
    saturation: Float[Tensor, " b"],
    hue: Float[Tensor, " b"],
    order: Sequence[int] = JITTER_ORDER,
) -> Float[Tensor, "b 3 h w"]:
    """Change the colours of images in 0..1: three factors and a shift of hue (in turns), in the order that is named.

    `order` lists BRIGHTNESS (0), CONTRAST (1), SATURATION (2) and HUE (3); one left out is not applied.
    """
    if not set(order) <= set(JITTER_ORDER):
        raise InputError(f"order is {tuple(order)}: list numbers from 0 to 3 (brightness, contrast, saturation, hue).")
    for step in order:
        if step == BRIGHTNESS:
            images = (images * _per_image(brightness)).clamp_(0, 1)
        elif step == CONTRAST:
            images = _blend(images, _luminance(images).mean(dim=(1, 2, 3), keepdim=True), contrast)
        elif step == SATURATION:
            images = _blend(images, _luminance(images), saturation)
        else:
            images = _shift_hue(images, hue)
    return images


def _blend(images: Tensor, base: Tensor, factor: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    weight = _per_image(factor)
    return (images * weight + base * (1 - weight)).clamp_(0, 1)


def _shift_hue(images: Float[Tensor, "b 3 h w"], turns: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
    red, green, blue = images.split(1, dim=1)
    value = images.amax(dim=1, keepdim=True)
    chroma = value - images.amin(dim=1, keepdim=True)
    span = chroma + (chroma == 0)
    from_red, from_green, from_blue = (green - blue) / span, (blue - red) / span + 2, (red - green) / span + 4
    sextant = torch.where(value == red, from_red, torch.where(value == green, from_green, from_blue))
    sextant = sextant + 6 * _per_image(turns)
    # A channel is darkest, by the chroma, over a third of the wheel, and red, green and blue are a third apart.
    wheel = torch.cat([sextant + 5, sextant + 3, sextant + 1], dim=1).remainder_(6)
    return value - chroma * torch.minimum(wheel, 4 - wheel).clamp_(0, 1)


def normalise(
    images: Pixels, mean: ChannelValues = IMAGENET_MEAN, std: ChannelValues = IMAGENET_STD
) -> Float[Tensor, "b c h w"]:
    """Bring images, bytes or floats in 0..1, to zero mean and unit deviation in each channel."""
    white = 1.0 if images.is_floating_point() else 255.0
    factors = _per_channel([1 / (white * deviation) for deviation in std], images.device)
    shifts = _per_channel([-centre / deviation for centre, deviation in zip(mean, std, strict=True)], images.device)
    return torch.addcmul(shifts, images.float(), factors)


def resize_batch(images: UInt8[Tensor, "b 3 h w"], size: tuple[int, int]) -> UInt8[Tensor, "b 3 h2 w2"]:
    """Resize whole images with antialiased bilinear interpolation, for evaluation and storage."""
    _check_size(size)
    if images.shape[2:] == size:
        return images
    resized = functional.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


class Augment:
    """Crop, flip, colour jitter, grey, blur and normalise a batch of bytes; a stage of probability 0 is left out.

    The jitter's order is fixed (torchvision shuffles it): to draw it on the device would mean computing every order.
    """

    def __init__(
        self,
        config: AugmentConfig,
        size: tuple[int, int],
        mean: ChannelValues = IMAGENET_MEAN,
        std: ChannelValues = IMAGENET_STD,
    ) -> None:
        _check_size(size)
        self.config, self.size, self.mean, self.std = config, size, mean, std

    def __call__(
        self,
        images: UInt8[Tensor, "b 3 h w"],
        generator: torch.Generator | None = None,
        original_sizes: Int[Tensor, "b 2"] | None = None,
    ) -> Float[Tensor, "b 3 h2 w2"]:
        """Augment images; where they were squashed to be stored, crops are drawn in their `original_sizes`."""
        _check_bytes(images)
        count, _, height, width = images.shape
        if original_sizes is None:
            original_sizes = _repeat_size((height, width), count, images.device)
        sizes = original_sizes.to(images.device, non_blocking=True)
        boxes = sample_crop_boxes(sizes, self.config.crop_scale, self.config.crop_ratio, generator)
        boxes = scale_boxes(boxes, sizes, (height, width))
        flip = _choose(self.config.flip_probability, images, generator)
        crops = crop_and_resize(images, boxes, self.size, flip).div_(255)
        return self._recolour(crops, generator)

    def without_crop(
        self, images: UInt8[Tensor, "b 3 h w"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "b 3 h w"]:
        """Augment images that were cropped to `size` before, by everything but the crop."""
        _check_bytes(images)
        if images.shape[2:] != self.size:
            raise InputError(f"images are {tuple(images.shape[2:])} pixels: crop them to {self.size} first.")
        flip = _choose(self.config.flip_probability, images, generator)
        if flip is not None:
            images = torch.where(_per_image(flip), images.flip(3), images)
        return self._recolour(images.float().div_(255), generator)

    def _recolour(self, images: Float[Tensor, "b 3 h w"], generator: torch.Generator | None) -> Tensor:
        config = self.config
        jittered = _choose(config.jitter_probability, images, generator)
        if jittered is not None:
            # A hue shifted by 0 comes back rounded, so images that are not chosen must be kept aside.
            images = torch.where(_per_image(jittered), self._jitter(images, generator), images)
        grey = _choose(config.grey_probability, images, generator)
        if grey is not None:
            images = to_grey(images, grey)
        blurred = _choose(config.blur_probability, images, generator)
        if blurred is not None:
            chances = _uniform((len(images),), images.device, generator)
            images = gaussian_blur(images, _between(config.blur_sigma, chances) * blurred)
        return normalise(images, self.mean, self.std)

    def _jitter(self, images: Float[Tensor, "b 3 h w"], generator: torch.Generator | None) -> Tensor:
        config = self.config
        reaches = (config.jitter_brightness, config.jitter_contrast, config.jitter_saturation)
        chances = _uniform((4, len(images)), images.device, generator)
        brightness, contrast, saturation = (
            _between((max(0.0, 1 - reach), 1 + reach), chance)
            for reach, chance in zip(reaches, chances[:3], strict=True)
        )
        hue = _between((-config.jitter_hue, config.jitter_hue), chances[3])
        return adjust_colours(images, brightness, contrast, saturation, hue)

    def __repr__(self) -> str:
        return f"Augment({self.config}, size={self.size}, mean={self.mean}, std={self.std})"


def _uniform(shape: Sequence[int], device: torch.device, generator: torch.Generator | None) -> Float[Tensor, "..."]:
    if generator is not None and generator.device.type != device.type:
        raise InputError(f"generator is on {generator.device}: make it on the images' device, {device}.")
    return torch.rand(tuple(shape), generator=generator, device=device)


def _between(bounds: Bounds, chances: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return bounds[0] + (bounds[1] - bounds[0]) * chances


def _choose(probability: float, images: Tensor, generator: torch.Generator | None) -> Bool[Tensor, " b"] | None:
    return _uniform((len(images),), images.device, generator) < probability if probability > 0 else None


def _repeat_size(size: tuple[int, int], count: int, device: torch.device) -> Int[Tensor, "b 2"]:
    return torch.stack([torch.full((count,), length, device=device) for length in size], dim=1)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _per_channel(values: Sequence[float], device: torch.device) -> Float[Tensor, "c 1 1"]:
    # Filled on the device: a tensor made from a list is copied there, and the host would wait for the copy.
    return torch.cat([torch.full((1, 1, 1), value, device=device) for value in values])


def _check_bytes(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise InputError(f"images are {images.dtype}: give bytes (torch.uint8) in 0..255.")


def _check_size(size: tuple[int, int]) -> None:
    if min(size) < 2:
        raise InputError(f"size is {size}: give a height and a width of at least 2 pixels.")


def _check_range(name: str, value: Bounds, highest: float = math.inf) -> None:
    if not 0 < value[0] <= value[1] <= highest or math.isinf(value[1]):
        bound = "" if math.isinf(highest) else f" of at most {highest:g}"
        raise InputError(f"{name} is {value}: give two numbers{bound} above 0, the smaller one first.")


def _check_number(name: str, value: float, highest: float = math.inf) -> None:
    if not 0 <= value <= highest or math.isinf(value):
        remedy = "a number of at least 0" if math.isinf(highest) else f"a number from 0 to {highest:g}"
        raise InputError(f"{name} is {value}: give {remedy}.")
