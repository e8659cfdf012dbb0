"""Folders of images: classes, splits, links, bad files."""

import os

import numpy as np
import pytest
import torch
from written_images import assert_refused, encoded, one_sentence, shades, write, write_shard

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import absolute_name, open_source
from stop_mim.errors import InputError
from stop_mim.evaluation.data import open_task_data
from stop_mim.training.callbacks.probe import choose_label

pytestmark = pytest.mark.usefixtures("own_folders")


def test_class_folders(tmp_path):
    write(tmp_path / "dog" / "b.PNG", 3)
    write(tmp_path / "dog" / "deep" / "a.Jpeg", 2, "JPEG")
    write(tmp_path / "cat" / "z.webp", 1, "WEBP")
    write(tmp_path / "cat" / ".hidden.png", 9)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    source = open_source(str(tmp_path))
    assert source.class_names == ("cat", "dog")
    assert source.labels["class"].tolist() == [0, 1, 1]
    assert source.labels["class"].dtype == np.int64
    assert [os.path.relpath(source.describe(index), tmp_path) for index in range(3)] == [
        "cat/z.webp",
        "dog/b.PNG",
        "dog/deep/a.Jpeg",
    ]
    assert source.read(1).tolist() == torch.tensor([3, 0, 0])[:, None, None].expand(3, 4, 6).tolist()
    assert [source.image_name(index) for index in range(3)] == ["cat/z.webp", "dog/b.PNG", "dog/deep/a.Jpeg"]
    assert source.size(2) == (4, 6)
    assert source.stacked() is None


def test_bad_files_in_a_folder_are_bad_images(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    source = open_source(str(tmp_path))
    for attempt in (source.read, source.size):
        with pytest.raises(BadImage, match="empty") as error:
            attempt(0)
        assert error.value.name == source.describe(0)


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_a_file_that_changes_or_disappears_after_the_data_were_opened_is_one_sentence(tmp_path, kind):
    file = tmp_path / ("s.tar" if kind == "wds" else "a.png")
    name, write_again = (f"wds:{file}", write_one_shard) if kind == "wds" else (str(tmp_path), write)
    write_again(file, 1)
    os.utime(file, (1000, 1000))
    source, content = open_source(name), file.read_bytes()
    assert shades(source) == [1]
    for damage, words in (
        # The same size, in place.
        (lambda: file.write_bytes(content), "has changed"),
        (lambda: (file.write_bytes(content + content), os.utime(file, (1000, 1000))), "has changed"),
        (file.unlink, "has disappeared"),
    ):
        damage()
        with pytest.raises(InputError, match=f"{file.name} {words} since the data were opened") as error:
            source.read(0)
        one_sentence(error)
    file.write_bytes(content)
    os.utime(file, (1000, 1000))
    assert shades(source) == [1]


def write_one_shard(path, shade):
    write_shard(path, [("a.png", encoded(shade))])


def test_unusable_folders_are_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "notes.txt").write_text("no image")
    assert_refused(tmp_path, r"has no images: .*jpeg, jpg")
    (tmp_path / "cat" / "a.HEIC").write_text("no image")
    assert_refused(tmp_path, r"has no images, but 1 \.heic: convert them to JPEG\.")


def test_images_at_the_top_and_below_are_read_without_labels_and_other_files_are_counted(tmp_path):
    write(tmp_path / "a.png", 1)
    flat = open_source(str(tmp_path))
    assert (flat.labels, flat.no_labels) == ({}, "")
    write(tmp_path / "cat" / "deep" / "b.png", 2)
    for name in ("notes.txt", "c.HEIC", "cat/d.heic", "README", ".hidden.txt"):
        (tmp_path / name).write_text("no image")
    source = open_source(str(tmp_path))
    assert shades(source) == [1, 2]
    assert (source.labels, source.class_names) == ({}, ())
    assert source.ignored == {".txt": 1, ".heic": 2, "": 1}
    # What needs labels says why there are none.
    for labelled in (lambda: open_task_data(str(tmp_path)), lambda: choose_label(source, "auto")):
        with pytest.raises(InputError, match=r"images both at its top \(a\.png\) and in sub-folders") as error:
            labelled()
        one_sentence(error)


def test_a_name_is_made_absolute_if_it_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photos" / "a.png", 1)
    assert absolute_name("photos/") == str(tmp_path / "photos")
    assert absolute_name("wds:shards-{00..09}.tar") == f"wds:{tmp_path}/shards-{{00..09}}.tar"
    for name in ("scenes:count=8,size=32", "torchvision:CIFAR100", "hf:owner/name", "wds:https://host/a-{0..9}.tar"):
        assert absolute_name(name) == name


def test_split_folders(tmp_path):
    write(tmp_path / "train" / "ant" / "a.png", 1)
    write(tmp_path / "train" / "bee" / "b.png", 2)
    write(tmp_path / "val" / "bee" / "c.png", 3)
    write(tmp_path / "top.png", 5)
    write(tmp_path / "holiday" / "deep" / "e.png", 6)
    train = open_source(str(tmp_path))
    assert shades(train) == [1, 2]
    assert train.ignored == {"images beside train/ and val/ (move them there to use them)": 2}
    test = open_source(str(tmp_path), "test")
    assert shades(test) == [3]
    assert test.labels["class"].tolist() == [1]
    assert test.image_name(0) == "bee/c.png"
    assert_refused(tmp_path, r"no split 'dev': choose one of holiday, train, val\.", "dev")
    write(tmp_path / "val" / "images" / "d.png", 4)
    assert_refused(tmp_path, "images is not a class of the training split", "test")


def test_train_may_be_a_class(tmp_path):
    write(tmp_path / "plane" / "a.png", 1)
    write(tmp_path / "train" / "b.png", 2)
    assert open_source(str(tmp_path)).class_names == ("plane", "train")


def test_links_are_followed_without_looping(tmp_path):
    write(tmp_path / "elsewhere" / "a.png", 1)
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "cat" / "up").symlink_to(tmp_path / "set")
    for name, target in (("self", "self"), ("self.png", "self.png"), ("there", "back"), ("back", "there")):
        (tmp_path / "set" / "dog" / name).symlink_to(tmp_path / "set" / "dog" / target)
    source = open_source(str(tmp_path / "set"))
    assert len(source) == 1
    assert source.class_names == ("dog",)


def test_folder_fingerprints(tmp_path):
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.png", 1)
        os.utime(tmp_path / folder / "a.png", (1000, 1000))
    one, two = (open_source(str(tmp_path / folder)).fingerprint() for folder in ("one", "two"))
    assert one == two
    assert len(one) == 16
    os.utime(tmp_path / "two" / "a.png", (1000, 2000))
    assert open_source(str(tmp_path / "two")).fingerprint() != one
    write(tmp_path / "one" / "b.png", 2)
    assert open_source(str(tmp_path / "one")).fingerprint() != one
