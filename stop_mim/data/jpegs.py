"""JPEG files: what their headers tell, and the quick decoder for the usual ones.

Usual means Huffman-coded with eight bits a sample, one or three components and no note that the image lies on its
side. Torchvision's libjpeg gives the same pixels as Pillow's in less time; libjpeg may note damage on standard error.
"""

import importlib
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import PIL.Image
import torch
from jaxtyping import UInt8
from PIL import ExifTags
from torch import Tensor

from stop_mim.data.quiet import quieten_pillow

QUICK_PIXELS = 2**26
"""Images of more pixels are left to Pillow, which has limits of its own."""

AS_RGB = 3
"""What torchvision's operators call ImageReadMode.RGB."""

_START = b"\xff\xd8"
_END = b"\xff\xd9"
_EXIF = b"Exif\0\0"
# Baseline, extended and progressive frames with Huffman codes; all other frames are rare or lossless.
_USUAL_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
_EXIF_SEGMENT = 0xE1


class JpegHeader(NamedTuple):
    """The size of a usual, upright JPEG, and how many components it has: 1 is grey, 3 is colour."""

    height: int
    width: int
    components: int


def jpeg_header(encoded: bytes) -> JpegHeader | None:
    """The header of a usual JPEG; None for all that has to go through Pillow, other formats and damage included."""
    if not encoded.startswith(_START):
        return None
    place, exif = 2, b""
    while place + 10 <= len(encoded):
        if encoded[place] != 0xFF:
            return None
        marker = encoded[place + 1]
        if marker in _USUAL_FRAMES:
            return _frame_header(encoded, place + 4) if exif_orientation(exif) == 1 else None
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


def _frame_header(encoded: bytes, place: int) -> JpegHeader | None:
    bits, height, width, components = struct.unpack_from(">BHHB", encoded, place)
    usual = bits == 8 and components in (1, 3) and 0 < height * width <= QUICK_PIXELS
    return JpegHeader(height, width, components) if usual else None


def exif_orientation(encoded_exif: bytes | None) -> int:
    """The orientation that an EXIF block notes; 1, upright, where there is none or it cannot be read."""
    if not encoded_exif:
        return 1
    quieten_pillow()
    exif = PIL.Image.Exif()
    try:
        exif.load(encoded_exif)
        return int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1  # A broken note on the image does not make a bad image.


def has_end(encoded: bytes) -> bool:
    """Whether the file ends as a whole JPEG does."""
    return encoded.rstrip(b"\0").endswith(_END)


def as_tensor(encoded: bytes) -> UInt8[Tensor, " n"]:
    """A copy of the bytes, as decoders take them."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def decode_usual_jpeg(encoded: bytes) -> UInt8[Tensor, "height width 3"] | None:
    """The pixels of a JPEG that has a header here, interleaved as libjpeg writes them; None where it fails."""
    decode = torchvision_operator("decode_jpeg")
    # Where torchvision fails it loses memory, so that it is not asked to decode files that were cut off.
    if decode is None or not has_end(encoded):
        return None
    try:
        return decode(as_tensor(encoded), AS_RGB, False).permute(1, 2, 0)
    except RuntimeError:
        return None


@cache
def torchvision_operator(name: str) -> Callable[..., Any] | None:
    """An operator of torchvision's image library; None where torchvision comes without it.

    The function around it, which announces its removal at each call, costs half as much as a small image.
    """
    try:
        importlib.import_module("torchvision.io")
        return getattr(torch.ops.image, name)
    except (ImportError, AttributeError):
        return None
