"""Encoded images to RGB pixels, on the CPU. Every failure is a BadImage with a reason, never a warning.

Usual JPEGs go through torchvision's libjpeg, everything else through Pillow. Transparent pixels are put on
white, 16-bit samples keep their high byte, EXIF orientation is applied, and of an animation the first frame is read.
"""

import importlib
import io
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import torch
from jaxtyping import UInt8
from PIL import ExifTags
from torch import Tensor
from torch.nn import functional

from stop_mim.data.augment import Interpolation
from stop_mim.errors import first_line

MAX_PIXELS = 2**26
"""The most pixels an image may have: 67,108,864, which is 8192 by 8192."""
IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})

SHRINKS = (8, 4)
"""Factors at which libjpeg decodes a smaller image; smaller factors take as long as the whole image."""

# Given explicitly, because Pillow would also try formats that run other programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
AS_RGB = 3  # torchvision's ImageReadMode.RGB
# EXIF orientations whose height and width are exchanged, and the dimensions that are flipped after that.
_EXCHANGED = (5, 6, 7, 8)
_FLIPPED = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}
# JPEG: baseline, extended and progressive frames with Huffman codes; all other frames are rare or lossless.
_USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
_EXIF_SEGMENT, _EXIF = 0xE1, b"Exif\0\0"

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""


class BadImage(Exception):
    """An image that cannot be read: its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        # Both go to Exception, or unpickling (from a worker) would fail.
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def decode_image(encoded: bytes, name: str) -> UInt8[Tensor, "3 height width"]:
    """Return the upright RGB image; the number of pixels is checked from the header, before anything is decoded."""
    return OpenedImage.of(encoded, name).decode().permute(2, 0, 1).contiguous()


@dataclass(frozen=True, eq=False)
class OpenedImage:
    """An image whose size is known: a usual JPEG that is not decoded yet, or pixels."""

    pixels: UInt8[Tensor, "height width 3"] | None
    size: tuple[int, int]
    encoded: bytes = b""
    name: str = ""
    components: int = 0

    @classmethod
    def of(cls, encoded: bytes, name: str) -> "OpenedImage":
        """Open an encoded image; raises BadImage."""
        return cls.of_jpeg(encoded, name) or cls.of_pixels(_decode_with_pillow(encoded, name))

    @classmethod
    def of_jpeg(cls, encoded: bytes, name: str) -> "OpenedImage | None":
        """Open a usual JPEG; None for other images."""
        header = jpeg_header(encoded)
        return None if header is None else cls(None, header[:2], encoded, name, components=header[2])

    @classmethod
    def of_pixels(cls, pixels: UInt8[Tensor, "height width 3"]) -> "OpenedImage":
        """Open an image that is decoded already."""
        return cls(pixels, (pixels.shape[0], pixels.shape[1]))

    def decode(self) -> UInt8[Tensor, "height width 3"]:
        """Return the whole image; raises BadImage."""
        if self.pixels is not None:
            return self.pixels
        quick = _decode_usual_jpeg(self.encoded)
        return _decode_with_pillow(self.encoded, self.name) if quick is None else quick

    def decode_part(self, box: Box, size: tuple[int, int]) -> tuple[UInt8[Tensor, "height width 3"], Box]:
        """Return pixels, and the box in them, for a box that will be resized to `size`; raises BadImage.

        A JPEG whose box is at least four (eight) times as large as `size` both ways is decoded at a quarter (an eighth)
        of its size, which is quicker. libjpeg shrinks it and it is resized with antialiasing from there: the finest
        details differ a little, and the box is rounded to pixels of the shrunken image.
        """
        for shrink in SHRINKS if self.pixels is None else ():
            if box[2] >= shrink * size[0] and box[3] >= shrink * size[1]:
                pixels = _decode_shrunk_jpeg(self.encoded, self.name, shrink)
                rows, columns = pixels.shape[0] / self.size[0], pixels.shape[1] / self.size[1]
                top, left = round(box[0] * rows), round(box[1] * columns)
                bottom, right = round((box[0] + box[2]) * rows), round((box[1] + box[3]) * columns)
                return pixels, (top, left, bottom - top, right - left)
        pixels = self.decode()
        if tuple(pixels.shape[:2]) != self.size:
            raise BadImage(self.name, "its size is not that of its header")
        return pixels, box


def cut(
    pixels: UInt8[Tensor, "height width 3"], box: Box, size: tuple[int, int], interpolation: Interpolation = "bilinear"
) -> UInt8[Tensor, "height2 width2 3"]:
    """Cut a box, which must lie inside the image, and resize it with antialiasing."""
    top, left, height, width = box
    # A batch of one in channels-last layout: the resizing of bytes works pixel by pixel, and is quickest there.
    images = pixels.contiguous()[None].permute(0, 3, 1, 2)
    inside = images[:, :, top : top + height, left : left + width]
    return functional.interpolate(inside, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)


def image_size(encoded: bytes, name: str) -> tuple[int, int]:
    """Return (height, width) of the upright image, from the header alone."""
    with _failures_as_bad_image(name):
        image = _open(encoded)
        exchanged = _orientation(image) in _EXCHANGED
        return (image.width, image.height) if exchanged else (image.height, image.width)


def rgb_pixels(image: PIL.Image.Image) -> UInt8[Tensor, "3 height width"]:
    """Return the pixels of a Pillow image of any mode but floating point, as RGB on white."""
    return _interleaved(image).permute(2, 0, 1).contiguous()


def upright_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an opened image as training reads its file: upright and RGB, on white."""
    return PIL.Image.fromarray(_upright(image).numpy())


def quieten_pillow() -> None:
    """Ignore Pillow's warnings from now on: what matters becomes a BadImage."""
    # A permanent filter: catch_warnings is not thread-safe.
    if _PILLOW_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", module=_PILLOW_WARNINGS[3].pattern)


def _decode_with_pillow(encoded: bytes, name: str) -> UInt8[Tensor, "height width 3"]:
    with _failures_as_bad_image(name):
        image = _open(encoded)
        check_pixels(image.height, image.width)
        return _upright(image)


def check_pixels(height: int, width: int) -> None:
    """Raise ValueError for an image of this size if it is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} of more than {MAX_PIXELS:,} pixels")


def _decode_shrunk_jpeg(encoded: bytes, name: str, shrink: int) -> UInt8[Tensor, "height width 3"]:
    """Decode a usual JPEG at a fraction of its size, which libjpeg makes from the lowest frequencies of each block."""
    with _failures_as_bad_image(name):
        image = _open(encoded)
        image.draft("RGB", (image.width // shrink, image.height // shrink))
        return _interleaved(image)


def _upright(image: PIL.Image.Image) -> UInt8[Tensor, "height width 3"]:
    orientation, pixels = _orientation(image), _interleaved(image)
    pixels = pixels.transpose(0, 1) if orientation in _EXCHANGED else pixels
    return pixels.flip(_FLIPPED[orientation]) if orientation in _FLIPPED else pixels


def _interleaved(image: PIL.Image.Image) -> UInt8[Tensor, "height width 3"]:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        return torch.from_numpy(grey.astype(np.uint8))[..., None].expand(-1, -1, 3)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return torch.from_numpy(np.array(image))


@contextmanager
def _failures_as_bad_image(name: str) -> Iterator[None]:
    quieten_pillow()
    try:
        yield
    except PIL.UnidentifiedImageError:
        raise BadImage(name, "not an image in one of the formats " + ", ".join(_FORMATS)) from None
    except PIL.Image.DecompressionBombError:
        raise BadImage(name, f"more than {MAX_PIXELS:,} pixels") from None
    # Pillow's plugins raise a dozen kinds of exceptions for corrupt files, SyntaxError and struct.error among them.
    except Exception as error:
        raise BadImage(name, first_line(error)) from error


def _open(encoded: bytes) -> PIL.Image.Image:
    if not encoded:
        raise ValueError("the file is empty")
    image = PIL.Image.open(io.BytesIO(encoded), formats=_FORMATS)
    if not image.height * image.width:
        raise ValueError(f"an image of {image.width}x{image.height} pixels")
    return image


def _orientation(image: PIL.Image.Image) -> int:
    # Pillow turns TIFFs itself; and it would decode a whole PNG to look for EXIF behind the pixels.
    return 1 if image.format == "TIFF" else _exif_orientation(image.info.get("exif"))


def _exif_orientation(encoded_exif: bytes | None) -> int:
    if not encoded_exif:
        return 1
    quieten_pillow()
    exif = PIL.Image.Exif()
    try:
        exif.load(encoded_exif)
        return int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1  # Broken EXIF data do not make an image bad.


def jpeg_header(encoded: bytes) -> tuple[int, int, int] | None:
    """Return (height, width, components) of a usual JPEG; None for files that Pillow has to decode, or damaged ones.

    Usual means Huffman-coded with eight bits a sample, one component (grey) or three (colour), and upright.
    """
    if not encoded.startswith(b"\xff\xd8"):
        return None
    place, exif = 2, b""
    while place + 10 <= len(encoded):
        if encoded[place] != 0xFF:
            return None
        marker = encoded[place + 1]
        if marker in _USUAL_FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", encoded, place + 4)
            usual = bits == 8 and components in (1, 3) and 0 < height * width <= MAX_PIXELS
            return (height, width, components) if usual and _exif_orientation(exif) == 1 else None
        if marker not in _SEGMENTS:
            return None
        length = int.from_bytes(encoded[place + 2 : place + 4], "big")
        if length < 2:
            return None
        if marker == _EXIF_SEGMENT and encoded.startswith(_EXIF, place + 4):
            if exif:
                return None
            exif = encoded[place + 4 : place + 2 + length]
        place += 2 + length
    return None


def has_end(encoded: bytes) -> bool:
    """Whether a JPEG has its end marker."""
    return encoded.rstrip(b"\0").endswith(b"\xff\xd9")


def as_tensor(encoded: bytes) -> UInt8[Tensor, " n"]:
    """Return the bytes as a tensor."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _decode_usual_jpeg(encoded: bytes) -> UInt8[Tensor, "height width 3"] | None:
    decode = torchvision_operator("decode_jpeg")
    # torchvision leaks memory when it fails, so truncated files are left to Pillow.
    if decode is None or not has_end(encoded):
        return None
    try:
        return decode(as_tensor(encoded), AS_RGB, False).permute(1, 2, 0)
    except RuntimeError:
        return None


@cache
def torchvision_operator(name: str) -> Callable[..., Any] | None:
    """Return a decoder of torchvision; None if it was built without."""
    # The public function warns of its deprecation at each call, which takes half as long as decoding a small image.
    try:
        importlib.import_module("torchvision.io")
        return getattr(torch.ops.image, name)
    except (ImportError, AttributeError):
        return None
