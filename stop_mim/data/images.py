"""Encoded images to RGB tensors: every failure is a BadImage with a reason, never a warning.

Usual JPEGs go the quick way of jpegs.py; all else, and all that fails there, through Pillow.
Transparent pixels are laid on white, 16-bit samples keep their high byte, EXIF orientation is applied, and of an
animation the first frame is read.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import PIL.Image
import torch
from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data.jpegs import decode_usual_jpeg, exif_orientation, jpeg_header
from stop_mim.data.quiet import quieten_pillow
from stop_mim.errors import first_line

MAX_PIXELS = 2**26
"""The most pixels an image may have: 67,108,864, which is 8192 by 8192."""

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})

# Named, because Pillow would otherwise also try formats that run other programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

_AS_STORED: tuple[bool, tuple[int, ...]] = (False, ())

# EXIF orientation: whether height and width change places, and then which dimensions are flipped.
_ORIENTATIONS: dict[int, tuple[bool, tuple[int, ...]]] = {
    2: (False, (1,)),
    3: (False, (0, 1)),
    4: (False, (0,)),
    5: (True, ()),
    6: (True, (1,)),
    7: (True, (0, 1)),
    8: (True, (0,)),
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
    return decode_interleaved(encoded, name, max_pixels).permute(2, 0, 1).contiguous()


def decode_interleaved(encoded: bytes, name: str, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "height width 3"]:
    """The same with the channels of a pixel side by side, as decoders write them."""
    header = jpeg_header(encoded)
    if header is not None and header.height * header.width <= max_pixels:
        pixels = decode_usual_jpeg(encoded)
        if pixels is not None:
            return pixels
    return decode_with_pillow(encoded, name, max_pixels)


def decode_with_pillow(encoded: bytes, name: str, max_pixels: int = MAX_PIXELS) -> UInt8[Tensor, "height width 3"]:
    """The same, of any format and at any rate through Pillow."""
    with _failures_as_bad_image(name, max_pixels):
        image = _open(io.BytesIO(encoded))
        if image.height * image.width > max_pixels:
            raise ValueError(_too_large(f"{image.width}x{image.height}", max_pixels))
        return _upright(_interleaved(image), _orientation(image))


def decode_shrunk_jpeg(encoded: bytes, name: str, shrink: int) -> UInt8[Tensor, "height width 3"]:
    """A usual JPEG at 1/2, 1/4 or 1/8 of its size, which libjpeg makes from the lowest frequencies of each block."""
    with _failures_as_bad_image(name, MAX_PIXELS):
        image = _open(io.BytesIO(encoded))
        image.draft("RGB", (image.width // shrink, image.height // shrink))
        return _interleaved(image)


def image_size(encoded: bytes | io.BufferedReader, name: str) -> tuple[int, int]:
    """(height, width) of the upright image, from the header alone."""
    with _failures_as_bad_image(name, MAX_PIXELS):
        image = _open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
        exchanged, _ = _ORIENTATIONS.get(_orientation(image), _AS_STORED)
        return (image.width, image.height) if exchanged else (image.height, image.width)


def rgb_pixels(image: PIL.Image.Image) -> UInt8[Tensor, "3 height width"]:
    """The pixels of a Pillow image of any mode but floating point, as RGB; alpha is laid on white."""
    return _interleaved(image).permute(2, 0, 1).contiguous()


def _interleaved(image: PIL.Image.Image) -> UInt8[Tensor, "height width 3"]:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        return torch.from_numpy(grey.astype(np.uint8))[..., None].expand(-1, -1, 3)
    if _is_transparent(image):
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return torch.from_numpy(np.array(image))


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
        raise BadImage(name, first_line(error)) from error


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
    return 1 if image.format == "TIFF" else exif_orientation(image.info.get("exif"))


def _is_transparent(image: PIL.Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    exchanged, flipped = _ORIENTATIONS.get(orientation, _AS_STORED)
    if exchanged:
        pixels = pixels.transpose(0, 1)
    return pixels.flip(flipped) if flipped else pixels
