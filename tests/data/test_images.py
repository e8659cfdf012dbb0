import contextlib
import io
import pickle
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import ImageOps

from stop_mim.data.images import MAX_PIXELS, BadImage, decode_image, image_size

WIDTH, HEIGHT = 40, 24


def picture(mode="RGB"):
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return PIL.Image.fromarray(np.stack([x * 6, y * 10, (x + y) * 3], axis=-1).astype(np.uint8)).convert(mode)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


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
        ("RGB", "PNG", {}),
        ("RGB", "BMP", {}),
        ("RGB", "TIFF", {}),
        ("RGB", "PPM", {}),
        ("RGB", "WEBP", {"lossless": True}),
        ("P", "PNG", {}),
        ("P", "GIF", {}),
        ("L", "PNG", {}),
        ("1", "PNG", {}),
    ],
)
def test_lossless_formats_give_the_pixels(mode, kind, options):
    image = picture(mode)
    encoded = encode(image, kind, **options)
    assert torch.equal(decode_image(encoded, "a"), as_tensor(image))
    assert image_size(encoded, "a") == (HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "JPEG", {"quality": 95, "subsampling": 0}),
        ("RGB", "JPEG", {"quality": 95, "progressive": True}),
        ("L", "JPEG", {"quality": 95}),
        ("CMYK", "JPEG", {"quality": 95}),
        ("RGB", "WEBP", {"quality": 95}),
    ],
)
def test_lossy_formats_come_near_the_pixels(mode, kind, options):
    image = picture(mode)
    encoded = encode(image, kind, **options)
    difference = decode_image(encoded, "a").float() - as_tensor(image).float()
    assert difference.abs().mean() < 4
    assert image_size(encoded, "a") == (HEIGHT, WIDTH)


def test_decoded_tensors_are_contiguous_and_writable():
    for kind in ("JPEG", "PNG", "WEBP"):
        pixels = decode_image(encode(picture(), kind), "a")
        assert pixels.is_contiguous()
        pixels += 1


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_white(mode, kind):
    image = picture(mode)
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[:10] = 0
    image.putalpha(PIL.Image.fromarray(alpha))
    pixels = decode_image(encode(image, kind, **({"lossless": True} if kind == "WEBP" else {})), "a")
    assert (pixels[:, :10] == 255).all()
    assert torch.equal(pixels[:, 10:], as_tensor(picture("L" if mode == "LA" else "RGB"))[:, 10:])


def test_a_palette_with_transparency_is_laid_on_white_without_a_warning():
    image = picture("P")
    see_through = image.getpixel((0, 0))
    pixels = decode_image(encode(image, "PNG", transparency=bytes([255] * see_through + [0])), "a")
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_keep_their_high_byte():
    grey = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 60
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(encode(PIL.Image.fromarray(grey), kind), "a")
        assert torch.equal(pixels, torch.from_numpy((grey >> 8).astype(np.uint8)).expand(3, -1, -1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(picture(), kind, exif=exif)
    expected = as_tensor(ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(encoded))))
    pixels = decode_image(encoded, "a")
    assert pixels.shape == expected.shape
    assert (pixels.float() - expected.float()).abs().mean() < 4
    assert image_size(encoded, "a") == tuple(expected.shape[1:])


def test_broken_exif_does_not_matter():
    encoded = encode(picture(), "JPEG", exif=b"Exif\0\0II*\0nonsense")
    assert decode_image(encoded, "a").shape == (3, HEIGHT, WIDTH)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(kind):
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    encoded = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    red = decode_image(encoded, "a").float().mean(dim=(1, 2))
    assert red[0] > 250
    assert red[2] < 5


def test_image_size_reads_a_file_no_further_than_its_header(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(picture(), "JPEG")[:650])
    with open(path, "rb") as file:
        assert image_size(file, "a") == (HEIGHT, WIDTH)


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


@pytest.mark.parametrize("case", ["text", "empty", "huge PNG", "PNG of no width"])
def test_bad_headers_have_no_size(case):
    with pytest.raises(BadImage):
        image_size(BAD[case][0], "a")


def test_max_pixels_is_a_bound_that_may_be_reached():
    encoded = encode(picture(), "PNG")
    assert decode_image(encoded, "a", max_pixels=HEIGHT * WIDTH).shape == (3, HEIGHT, WIDTH)
    with pytest.raises(BadImage, match="40x24 of more than 959 pixels"):
        decode_image(encoded, "a", max_pixels=HEIGHT * WIDTH - 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_damaged_bytes_give_an_image_or_bad_image(kind):
    random = np.random.default_rng(0)
    whole = encode(picture("P" if kind == "GIF" else "RGB"), kind)
    for _ in range(60):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 4):
            damaged[place] ^= int(random.integers(1, 256))
        with contextlib.suppress(BadImage):
            assert decode_image(bytes(damaged), "a", max_pixels=10**6).dtype == torch.uint8


def test_bad_image_survives_pickling():
    copy = pickle.loads(pickle.dumps(BadImage("a.jpg", "truncated")))
    assert (copy.name, copy.reason) == ("a.jpg", "truncated")
