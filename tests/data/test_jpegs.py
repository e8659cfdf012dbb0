"""JPEG headers, and that the quick decoder gives what Pillow gives, of good files and of damaged ones."""

import contextlib
import io

import numpy as np
import PIL.Image
import pytest
import torch

from stop_mim.data import jpegs
from stop_mim.data.images import BadImage, decode_image, decode_interleaved, decode_shrunk_jpeg, decode_with_pillow
from stop_mim.data.jpegs import JpegHeader, decode_usual_jpeg, has_end, jpeg_header

HEIGHT, WIDTH = 45, 70


def picture(mode="RGB", height=HEIGHT, width=WIDTH):
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.BICUBIC).convert(mode)


def encode(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    note = PIL.Image.Exif()
    note[0x0112] = orientation
    return note


USUAL = {
    "full colour": encode(picture(), subsampling=0),
    "half colour": encode(picture(), subsampling=1),
    "quarter colour": encode(picture(), subsampling=2, quality=60),
    "progressive": encode(picture(), progressive=True),
    "restart markers": encode(picture(), restart_marker_blocks=3),
    "RGB inside": encode(picture(), keep_rgb=True),
    "grey": encode(picture("L")),
    "a comment and a profile": encode(picture(), comment=b"hello", icc_profile=b"profile" * 100),
    "upright by EXIF": encode(picture(), exif=exif(1)),
    "broken EXIF": encode(picture(), exif=b"Exif\0\0II*\0nonsense"),
}

UNUSUAL = {
    "CMYK": encode(picture("CMYK")),
    "lying by EXIF": encode(picture(), exif=exif(6)),
    "PNG": encode(picture(), "PNG"),
    "the start alone": b"\xff\xd8\xff",
    "empty": b"",
    "only segments": USUAL["full colour"][:20],
    "a segment of no length": b"\xff\xd8\xff\xe0\x00\x00" + bytes(100),
    "twelve bits": USUAL["full colour"].replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "arithmetic codes": USUAL["full colour"].replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
    "no height": USUAL["full colour"].replace(b"\x00\x11\x08\x00\x2d", b"\x00\x11\x08\x00\x00"),
    "two EXIF blocks": b"\xff\xd8" + 2 * (b"\xff\xe1\x00\x0aExif\0\0ab") + USUAL["full colour"][2:],
}


@pytest.mark.parametrize("case", USUAL)
def test_usual_jpegs_have_a_header_and_the_pixels_of_pillow(case):
    encoded = USUAL[case]
    assert jpeg_header(encoded) == JpegHeader(HEIGHT, WIDTH, 1 if case == "grey" else 3)
    quick = decode_usual_jpeg(encoded)
    assert quick.shape == (HEIGHT, WIDTH, 3)
    assert torch.equal(quick, decode_with_pillow(encoded, "a"))


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_files_have_no_header(case):
    assert jpeg_header(UNUSUAL[case]) is None


def test_images_above_the_bound_have_no_header(monkeypatch):
    for bound, expected in ((HEIGHT * WIDTH, JpegHeader(HEIGHT, WIDTH, 3)), (HEIGHT * WIDTH - 1, None)):
        monkeypatch.setattr(jpegs, "QUICK_PIXELS", bound)
        assert jpeg_header(USUAL["full colour"]) == expected


@pytest.mark.parametrize("case", [*USUAL, "CMYK", "lying by EXIF", "PNG"])
def test_without_the_quick_decoder_pillow_gives_the_same(case, monkeypatch):
    encoded = (USUAL | UNUSUAL)[case]
    quick = decode_image(encoded, "a")
    monkeypatch.setattr(jpegs, "torchvision_operator", lambda name: None)
    assert torch.equal(decode_image(encoded, "a"), quick)


def test_an_operator_that_is_not_there_is_none():
    assert jpegs.torchvision_operator("no_such_operator") is None


@pytest.mark.parametrize("progressive", [False, True])
def test_damage_is_judged_as_pillow_judges_it(progressive, monkeypatch):
    random = np.random.default_rng(0)
    whole = encode(picture(), progressive=progressive)
    outcomes = {"alike": 0, "differ": 0}
    for number in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            damaged[place] ^= int(random.integers(1, 256))
        encoded = bytes(damaged[: random.integers(10, len(whole))] if number % 3 == 0 else damaged)
        results = []
        for decode in (decode_interleaved, decode_with_pillow):
            results.append(None)
            with contextlib.suppress(BadImage):
                results[-1] = decode(encoded, "a", 10**6)
        quick, slow = results
        alike = (quick is None) == (slow is None) and (quick is None or torch.equal(quick, slow))
        outcomes["alike" if alike else "differ"] += 1
    # A handful of damaged headers are read by one library and refused by the other.
    assert outcomes["differ"] <= 3


def test_a_cut_file_has_no_end_and_is_bad():
    whole = USUAL["full colour"]
    assert has_end(whole)
    assert has_end(whole + bytes(10))
    assert not has_end(whole[:-1])
    assert not has_end(whole[: len(whole) // 2])
    assert not has_end(b"")
    with pytest.raises(BadImage, match="truncated"):
        decode_image(whole[: len(whole) // 2], "a")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_shrunken_jpegs_are_the_mean_of_their_blocks(mode, shrink):
    encoded = encode(picture(mode, 96, 160), quality=95, subsampling=0)
    pixels = decode_shrunk_jpeg(encoded, "a", shrink)
    assert pixels.shape == (96 // shrink, 160 // shrink, 3)
    blocks = decode_interleaved(encoded, "a").float().view(96 // shrink, shrink, 160 // shrink, shrink, 3)
    assert (pixels - blocks.mean(dim=(1, 3))).abs().mean() < 2


def test_a_bad_jpeg_is_bad_when_it_is_shrunk():
    with pytest.raises(BadImage, match="truncated"):
        decode_shrunk_jpeg(encode(picture())[:-200], "a", 4)
