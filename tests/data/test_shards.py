"""WebDataset's shards: samples, labels, the index."""

import contextlib
import json
import os
import tarfile

import numpy as np
import pytest
from written_images import add_member, assert_refused, encoded, shades, write_shard

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

pytestmark = pytest.mark.usefixtures("own_folders")


def test_shards(tmp_path):
    write_shard(
        tmp_path / "s-0.tar", [("a.png", encoded(1)), ("a.cls", b"7\n"), ("b.PNG", encoded(2)), ("b.cls", b"3")]
    )
    write_shard(
        tmp_path / "s-1.tar",
        [
            ("dir/a.seg.png", encoded(9)),
            ("dir/a.json", json.dumps({"label": 5}).encode()),
            ("dir/a.jpg", encoded(3)),
            ("dir/alone.txt", b"no image"),
        ],
    )
    source = open_source(f"wds:{tmp_path}/s-{{0..1}}.tar")
    assert shades(source) == [1, 2, 3]
    assert source.labels["class"].tolist() == [7, 3, 5]
    assert source.size(2) == (4, 6)
    assert source.describe(2) == f"{tmp_path / 's-1.tar'}#dir/a.jpg"
    assert [source.image_name(index) for index in range(3)] == ["a", "b", "dir/a"]
    assert shades(open_source(f"wds:{tmp_path}/s-*.tar")) == [1, 2, 3]


def test_shards_without_labels(tmp_path):
    write_shard(tmp_path / "s.tar", [("a.png", encoded(1)), ("b.png", encoded(2)), ("b.cls", b"3")])
    assert open_source(f"wds:{tmp_path}/s.tar").labels == {}


def test_the_index_of_a_shard_is_kept_until_the_shard_changes(tmp_path, monkeypatch):
    write_shard(tmp_path / "s.tar", [("a.png", encoded(1))])
    before = open_source(f"wds:{tmp_path}/s.tar").fingerprint()
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "open", lambda *_: pytest.fail("indexed again"))
        assert shades(open_source(f"wds:{tmp_path}/s.tar")) == [1]
    write_shard(tmp_path / "s.tar", [("a.png", encoded(1)), ("b.png", encoded(2))])
    os.utime(tmp_path / "s.tar", (1000, 1000))
    again = open_source(f"wds:{tmp_path}/s.tar")
    assert shades(again) == [1, 2]
    assert again.fingerprint() != before


def test_unusable_shards_are_refused(tmp_path):
    assert_refused(f"wds:{tmp_path}/s-{{0..2}}.tar", r"There is no file .*s-0\.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        add_member(archive, "a.png", encoded(1))
    assert_refused(f"wds:{tmp_path}/packed.tar", "cannot be read as a tar file")
    write_shard(tmp_path / "text.tar", [("a.txt", b"text")])
    assert_refused(f"wds:{tmp_path}/text.tar", "have no images")
    write_shard(tmp_path / "label.tar", [("a.png", encoded(1)), ("a.cls", b"cat")])
    assert_refused(f"wds:{tmp_path}/label.tar", r"label\.tar#a\.cls contains b'cat'")
    write_shard(tmp_path / "large.tar", [("a.png", encoded(1)), ("a.cls", b"9" * 20)])
    assert_refused(f"wds:{tmp_path}/large.tar", r"large\.tar#a\.cls contains b'9")
    assert_refused(f"wds:{tmp_path}/{{a", "cannot be expanded")


@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\xff" * 12])
def test_a_member_of_an_impossible_size_is_one_sentence(tmp_path, size):
    """As long as a number can be, and negative, in the header of the second image, with the right checksum."""
    write_shard(tmp_path / "s.tar", [(f"{shade}.png", encoded(shade)) for shade in range(6)])
    content = bytearray((tmp_path / "s.tar").read_bytes())
    header = content[1024:1536]
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content[1024:1536] = header
    (tmp_path / "s.tar").write_bytes(content)
    assert_refused(f"wds:{tmp_path}/s.tar", "cannot be read as a tar file")


def test_damaged_shards_are_one_sentence_or_bad_images(tmp_path):
    write_shard(tmp_path / "s.tar", [(f"{shade}.png", encoded(shade)) for shade in range(6)])
    whole, random = (tmp_path / "s.tar").read_bytes(), np.random.default_rng(0)
    for _ in range(20):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            damaged[place] ^= int(random.integers(1, 256))
        # Right checksums, or no damaged header would be looked at.
        for start in range(0, len(damaged), 512):
            if damaged[start + 257 : start + 262] == b"ustar":
                damaged[start + 148 : start + 156] = b" " * 8
                damaged[start + 148 : start + 156] = b"%06o\0 " % sum(damaged[start : start + 512])
        (tmp_path / "s.tar").write_bytes(damaged)
        with contextlib.suppress(InputError):
            source = open_source(f"wds:{tmp_path}/s.tar")
            for index in range(len(source)):
                with contextlib.suppress(BadImage):
                    source.read(index)
