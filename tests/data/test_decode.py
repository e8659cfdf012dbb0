"""Decoding: every format, bad images with a reason, JPEGs the quick way, and parts of images."""

import io
import pickle
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
import torch
from painted_images import picture as smooth
from PIL import ImageOps
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resized_crop

from stop_mim.data import decode, gpu_decode
from stop_mim.data.augment import crop_boxes, draw
from stop_mim.data.decode import (
    MAX_PIXELS,
    BadImage,
    OpenedImage,
    cut,
    decode_image,
    image_size,
    jpeg_header,
)
from stop_mim.data.gpu_decode import cut_each

WIDTH, HEIGHT = 40, 24


def picture(mode="RGB"):
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return PIL.Image.fromarray(np.stack([x * 6, y * 10, (x + y) * 3], axis=-1).astype(np.uint8)).convert(mode)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    note = PIL.Image.Exif()
    note[0x0112] = orientation
    return note


def as_tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def png_claiming(width, height):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    start = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + data


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        *(("RGB", kind, {}) for kind in ("PNG", "BMP", "TIFF", "PPM")),
        ("RGB", "WEBP", {"lossless": True}),
        ("P", "PNG", {}),
        ("P", "GIF", {}),
        ("L", "PNG", {}),
        ("1", "PNG", {}),
        ("CMYK", "JPEG", {"quality": 95}),
        ("RGB", "WEBP", {"quality": 95}),
    ],
)
def test_every_format_gives_the_pixels(mode, kind, options):
    image = picture(mode)
    encoded = encode(image, kind, **options)
    assert image_size(encoded, "a") == (HEIGHT, WIDTH)
    difference = (decode_image(encoded, "a").float() - as_tensor(image).float()).abs()
    assert difference.mean() < 4 if "quality" in options else difference.max() == 0


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_white(mode):
    image = picture(mode)
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[:10] = 0
    image.putalpha(PIL.Image.fromarray(alpha))
    pixels = decode_image(encode(image, "PNG"), "a")
    assert (pixels[:, :10] == 255).all()
    assert torch.equal(pixels[:, 10:], as_tensor(picture("L" if mode == "LA" else "RGB"))[:, 10:])
    palette = picture("P")
    see_through = bytes([255] * palette.getpixel((0, 0)) + [0])
    assert decode_image(encode(palette, "PNG", transparency=see_through), "a")[:, 0, 0].tolist() == [255] * 3


def test_sixteen_bits_keep_their_high_byte():
    grey = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 60
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(encode(PIL.Image.fromarray(grey), kind), "a")
        assert torch.equal(pixels, torch.from_numpy((grey >> 8).astype(np.uint8)).expand(3, -1, -1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_exif_orientation_is_applied(kind, orientation):
    encoded = encode(picture(), kind, exif=exif(orientation))
    expected = as_tensor(ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(encoded))))
    pixels = decode_image(encoded, "a")
    assert pixels.shape == expected.shape
    assert (pixels.float() - expected.float()).abs().mean() < 4
    assert image_size(encoded, "a") == tuple(expected.shape[1:])


def test_of_an_animation_the_first_frame_is_read():
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    encoded = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(encoded, "a")[:, 0, 0].tolist() == [255, 0, 0]


def test_the_header_is_enough_for_the_size():
    assert image_size(encode(picture(), "JPEG")[:650], "a") == (HEIGHT, WIDTH)


BAD = {
    "truncated JPEG": (encode(picture(), "JPEG")[:-100], "truncated"),
    "truncated PNG": (encode(picture(), "PNG")[:-60], "truncated"),
    "truncated WebP": (encode(picture(), "WEBP")[:-60], ""),
    "text": (b"this is no picture", "not an image"),
    "empty": (b"", "empty"),
    "JPEG start alone": (b"\xff\xd8\xff", ""),
    "huge PNG": (png_claiming(60_000, 60_000), f"more than {MAX_PIXELS:,} pixels"),
    "large PNG": (png_claiming(10_000, 10_000), f"10000x10000 of more than {MAX_PIXELS:,} pixels"),
    "PNG of no width": (png_claiming(0, 10), ""),
    "PNG without its data": (png_claiming(100, 100), ""),
    "floating point": (encode(picture("F"), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_images_say_why(case):
    encoded, reason = BAD[case]
    with pytest.raises(BadImage) as caught:
        decode_image(encoded, "folder/a.jpg")
    assert caught.value.name == "folder/a.jpg"
    assert reason in caught.value.reason
    assert str(caught.value) == f"folder/a.jpg: {caught.value.reason}"
    assert caught.value.reason
    assert "0x7" not in caught.value.reason
    assert "\n" not in caught.value.reason
    if case in ("text", "empty", "huge PNG", "PNG of no width"):
        with pytest.raises(BadImage):
            image_size(encoded, "a")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.name, copy.reason) == (caught.value.name, caught.value.reason)


def test_max_pixels_is_a_bound_that_may_be_reached(monkeypatch):
    for kind in ("PNG", "JPEG"):
        encoded = encode(picture(), kind)
        monkeypatch.setattr(decode, "MAX_PIXELS", HEIGHT * WIDTH)
        assert decode_image(encoded, "a").shape == (3, HEIGHT, WIDTH)
        monkeypatch.setattr(decode, "MAX_PIXELS", HEIGHT * WIDTH - 1)
        with pytest.raises(BadImage, match="40x24 of more than 959 pixels"):
            decode_image(encoded, "a")


USUAL = {
    "full colour": encode(smooth(0, 45, 70), "JPEG", subsampling=0),
    "half colour": encode(smooth(0, 45, 70), "JPEG", subsampling=1),
    "quarter colour": encode(smooth(0, 45, 70), "JPEG", subsampling=2, quality=60),
    "progressive": encode(smooth(0, 45, 70), "JPEG", progressive=True),
    "restart markers": encode(smooth(0, 45, 70), "JPEG", restart_marker_blocks=3),
    "RGB inside": encode(smooth(0, 45, 70), "JPEG", keep_rgb=True),
    "grey": encode(smooth(0, 45, 70).convert("L"), "JPEG"),
    "a comment and a profile": encode(smooth(0, 45, 70), "JPEG", comment=b"hello", icc_profile=b"profile" * 100),
    "upright by EXIF": encode(smooth(0, 45, 70), "JPEG", exif=exif(1)),
    "broken EXIF": encode(smooth(0, 45, 70), "JPEG", exif=b"Exif\0\0II*\0nonsense"),
}

UNUSUAL = {
    "CMYK": encode(smooth(0, 45, 70).convert("CMYK"), "JPEG"),
    "lying by EXIF": encode(smooth(0, 45, 70), "JPEG", exif=exif(6)),
    "PNG": encode(smooth(0, 45, 70), "PNG"),
    "the start alone": b"\xff\xd8\xff",
    "empty": b"",
    "only segments": USUAL["full colour"][:20],
    "a segment of no length": b"\xff\xd8\xff\xe0\x00\x00" + bytes(100),
    "twelve bits": USUAL["full colour"].replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "arithmetic codes": USUAL["full colour"].replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
    "no height": USUAL["full colour"].replace(b"\x00\x11\x08\x00\x2d", b"\x00\x11\x08\x00\x00"),
    "two EXIF blocks": b"\xff\xd8" + 2 * (b"\xff\xe1\x00\x0aExif\0\0ab") + USUAL["full colour"][2:],
}


def with_pillow(encoded, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(decode, "torchvision_operator", lambda name: None)
        return decode_image(encoded, "a")


@pytest.mark.parametrize("case", USUAL)
def test_usual_jpegs_have_a_header_and_the_pixels_of_pillow(case, monkeypatch):
    encoded = USUAL[case]
    assert jpeg_header(encoded) == (45, 70, 1 if case == "grey" else 3)
    assert torch.equal(decode_image(encoded, "a"), with_pillow(encoded, monkeypatch))


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_files_have_no_header(case):
    assert jpeg_header(UNUSUAL[case]) is None


def opened_jpeg(height, width, **options):
    return OpenedImage.of(encode(smooth(0, height, width), "JPEG", quality=95, **options), "a")


@pytest.mark.parametrize(("height", "shrink"), [(8 * 32, 8), (8 * 32 - 1, 4), (4 * 32, 4), (4 * 32 - 1, 1)])
def test_large_parts_are_decoded_at_a_fraction_of_their_size(height, shrink):
    opened, box = opened_jpeg(300, 400), (16, 24, height, 304)
    pixels, part = opened.decode_part(box, (32, 32))
    assert pixels.shape == (-(-300 // shrink), -(-400 // shrink), 3)
    assert part[2] >= 32
    expected = cut(opened.decode(), box, (32, 32)).float()
    assert (cut(pixels, part, (32, 32)) - expected).abs().mean() < (2 if shrink > 1 else 0.01)


def test_a_jpeg_that_is_cut_off_is_bad_at_any_size():
    opened = OpenedImage.of(encode(smooth(0, 300, 400), "JPEG")[:-200], "a")
    for box in ((0, 0, 300, 400), (0, 0, 30, 40)):
        with pytest.raises(BadImage, match="truncated"):
            opened.decode_part(box, (16, 16))


@pytest.mark.parametrize("box", [(0, 0, 50, 70), (3, 5, 40, 33), (49, 69, 1, 1)])
@pytest.mark.parametrize("size", [(24, 12), (64, 80)])
@pytest.mark.parametrize("kind", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_a_part_is_that_of_torchvision(box, size, kind):
    pixels = torch.from_numpy(np.array(smooth(0, 50, 70)))
    expected = resized_crop(pixels.permute(2, 0, 1).contiguous(), *box, list(size), kind, antialias=True)
    for layout in (pixels, pixels.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        assert (cut(layout, box, size, kind.value).int() - expected.permute(1, 2, 0).int()).abs().max() <= 1


@pytest.mark.parametrize("sizes", [((40, 60), (50, 30), (33, 33), (9, 90)), ((40, 60),)])
@pytest.mark.parametrize("at_once", [2**24, 3 * 40 * 50])
def test_parts_that_are_cut_together_are_each_their_own(sizes, at_once, monkeypatch):
    monkeypatch.setattr(gpu_decode, "PIXELS_AT_ONCE", at_once)
    images = [torch.from_numpy(np.array(smooth(n, *sizes[n % len(sizes)]))).permute(2, 0, 1) for n in range(12)]
    known = torch.tensor([image.shape[1:] for image in images])
    boxes = [tuple(b) for b in crop_boxes(known, draw(0, 0, torch.arange(12)), (0.1, 1.0), (0.5, 2.0)).tolist()]
    for crop, image, box in zip(cut_each(images, boxes, (16, 24), "bicubic"), images, boxes, strict=True):
        expected = cut(image.permute(1, 2, 0), box, (16, 24), "bicubic").permute(2, 0, 1)
        assert (crop.int() - expected.int()).abs().max() <= 1
