"""Encoded images to RGB tensors, through Pillow: every failure is a BadImage with a reason, never a warning.

Transparent pixels are laid on white, 16-bit samples keep their high byte, EXIF orientation is applied, and of an
animation the first frame is read.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import PIL.Image
import torch
from jaxtyping import UInt8
from PIL import ExifTags
from torch import Tensor

MAX_PIXELS = 2**26
"""The most pixels an image may have: 67,108,864, which is 8192 by 8192."""

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})

# Named, because Pillow would otherwise also try formats that run other programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

_PILLOW_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)

_AS_STORED: tuple[bool, tuple[int, ...]] = (False, ())

# EXIF orientation: whether height and width change places, and then which dimensions are flipped.
_ORIENTATIONS: dict[int, tuple[bool, tuple[int, ...]]] = {
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}


class BadImage(Exception):
    """An image that cannot be read: its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        # Both go to Exception, or unpickling (from a loader's worker) would fail.
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def decode_image(encoded: bytes, name: str, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "3 height width"]:
    """The upright RGB image; the number of pixels is checked from the header, before anything is decoded."""
    with _failures_as_bad_image(name, max_pixels):
        image = _open(io.BytesIO(encoded))
        if image.height * image.width > max_pixels:
            raise ValueError(_too_large(f"{image.width}x{image.height}", max_pixels))
        return _upright(rgb_pixels(image), _orientation(image))


def image_size(encoded: bytes | io.BufferedReader, name: str) -> tuple[int, int]:
    """(height, width) of the upright image, from the header alone."""
    with _failures_as_bad_image(name, MAX_PIXELS):
        image = _open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
        exchanged, _ = _ORIENTATIONS.get(_orientation(image), _AS_STORED)
        return (image.width, image.height) if exchanged else (image.height, image.width)


def rgb_pixels(image: PIL.Image.Image) -> UInt8[Tensor, "3 height width"]:
    """The pixels of a Pillow image of any mode but floating point, as RGB; alpha is laid on white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        return torch.from_numpy(grey.astype(np.uint8)).expand(3, -1, -1).contiguous()
    if _is_transparent(image):
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def quieten_pillow() -> None:
    """Ignores the warnings of Pillow from now on: what they tell becomes a BadImage or does not matter."""
    # A lasting filter, since catch_warnings leaves the filters in disorder when several threads decode.
    if _PILLOW_FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=_PILLOW_FILTER[3].pattern)


@contextmanager
def _failures_as_bad_image(name: str, max_pixels: int) -> Iterator[None]:
    quieten_pillow()
    try:
        yield
    except PIL.UnidentifiedImageError:
        raise BadImage(name, "not an image in one of the formats " + ", ".join(_FORMATS)) from None
    except PIL.Image.DecompressionBombError:
        raise BadImage(name, _too_large("an image", max_pixels)) from None
    # Pillow's plugins answer corrupt files with a dozen kinds of exceptions, SyntaxError and struct.error among them.
    except Exception as error:
        raise BadImage(name, (str(error) or type(error).__name__).splitlines()[0]) from error


def _too_large(what: str, max_pixels: int) -> str:
    pillow_limit = 2 * (PIL.Image.MAX_IMAGE_PIXELS or max_pixels)
    return f"{what} of more than {min(max_pixels, pillow_limit):,} pixels"


def _open(stream: io.BytesIO | io.BufferedReader) -> PIL.Image.Image:
    if not stream.read(1):
        raise ValueError("the file is empty")
    stream.seek(0)
    image = PIL.Image.open(stream, formats=_FORMATS)
    if not image.height * image.width:
        raise ValueError(f"an image of {image.width}x{image.height} pixels")
    return image


def _orientation(image: PIL.Image.Image) -> int:
    # Pillow turns TIFFs itself; and it would decode a whole PNG to look for EXIF behind the pixels.
    encoded_exif = image.info.get("exif")
    if image.format == "TIFF" or not encoded_exif:
        return 1
    exif = PIL.Image.Exif()
    try:
        exif.load(encoded_exif)
        return int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1  # A broken note on the image does not make a bad image.


def _is_transparent(image: PIL.Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    exchanged, flipped = _ORIENTATIONS.get(orientation, _AS_STORED)
    if exchanged:
        pixels = pixels.transpose(1, 2)
    return (pixels.flip(flipped) if flipped else pixels).contiguous()
