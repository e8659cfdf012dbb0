"""CLEVR: labels of the right images, and files of scenes that cannot be used."""

import json

import numpy as np
import pytest
from written_images import one_sentence, shades, write

from stop_mim.data.sources import open_source
from stop_mim.errors import InputError


def scene(file, distances):
    things = [{"shape": "cube", "3d_coords": [0.0, 0.0, 0.1], "pixel_coords": [3, 2, value]} for value in distances]
    return {"image_index": 0, "objects": things, "relationships": {"left": [[]]}, "image_filename": file}


def write_split(folder, split, scenes, images=None):
    for shade, file in enumerate(images or [one["image_filename"] for one in scenes]):
        write(folder / "images" / split / file, shade)
    (folder / "scenes").mkdir(exist_ok=True)
    (folder / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": scenes}))


@pytest.fixture
def clevr(tmp_path):
    # The scenes are not in the order of the files, and the nearest object is not the first.
    train = [scene("CLEVR_train_000002.png", [12.5, 9.25, 10, 11]), scene("CLEVR_train_000000.png", [8.5, 8.75, 9])]
    write_split(tmp_path, "train", train)
    write_split(tmp_path, "val", [scene("CLEVR_val_000000.png", [7.5])])
    return tmp_path


def refusal(folder, split="train"):
    with pytest.raises(InputError) as error:
        open_source(str(folder), split)
    return one_sentence(error)


def test_labels_belong_to_the_images_of_their_names(clevr):
    source = open_source(str(clevr))
    assert source.layout == "clevr"
    assert [source.image_name(index) for index in range(2)] == ["CLEVR_train_000000.png", "CLEVR_train_000002.png"]
    assert source.labels["count"].tolist() == [3, 4]
    assert source.labels["distance"].tolist() == [8.5, 9.25]
    assert shades(source) == [1, 0]
    assert source.size(0) == (4, 6)
    assert source.describe(1) == str(clevr / "images" / "train" / "CLEVR_train_000002.png")
    # The same kinds of numbers as those of drawn scenes.
    drawn = open_source("scenes:count=1,size=32").labels
    assert {key: value.dtype for key, value in source.labels.items()} == {key: drawn[key].dtype for key in drawn}


def test_the_test_split_is_val(clevr):
    (clevr / "images" / "test").mkdir()
    for split in ("test", "val", "validation"):
        source = open_source(str(clevr), split)
        assert source.image_name(0) == "CLEVR_val_000000.png"
        assert source.labels["count"].tolist() == [1]
    assert "'extra': choose one of train, val." in refusal(clevr, "extra")


def test_labels_enter_the_fingerprint(clevr):
    before = open_source(str(clevr)).fingerprint()
    path = clevr / "scenes" / "CLEVR_train_scenes.json"
    path.write_text(path.read_text().replace("9.25", "9.5"))
    assert open_source(str(clevr)).fingerprint() != before


def test_a_folder_of_classes_called_images_and_scenes_is_not_clevr(tmp_path):
    for name in ("images", "scenes"):
        write(tmp_path / name / "a.png", 0)
    assert open_source(str(tmp_path)).class_names == ("images", "scenes")


def test_hidden_files_and_other_files_are_no_images(clevr):
    (clevr / "images" / "train" / "._CLEVR_train_000000.png").write_bytes(b"")
    (clevr / "images" / "train" / "LICENSE.txt").write_text("CC BY 4.0")
    assert len(open_source(str(clevr))) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\xff",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"scenes": []}',
        b'{"scenes": [7]}',
        b'{"scenes": [{"objects": []}]}',
        *(
            b'{"scenes": [{"image_filename": "a.png", "objects": %b}]}' % objects
            for objects in (
                b"null",
                b'[{"shape": "cube"}]',
                b'[{"pixel_coords": [1, 2]}]',
                b'[{"pixel_coords": [1, 2, "near"]}]',
                b'[{"pixel_coords": [1, 2, NaN]}]',
            )
        ),
    ],
)
def test_files_that_are_no_scenes_are_refused(clevr, content):
    (clevr / "scenes" / "CLEVR_train_scenes.json").write_bytes(content)
    assert "CLEVR_train_scenes.json" in refusal(clevr)


def test_images_and_scenes_must_be_the_same(tmp_path):
    write_split(tmp_path, "train", [scene("a.png", [9])] * 2)
    assert "a.png has a second scene" in refusal(tmp_path)
    scenes = [scene(f"{letter}.png", [9]) for letter in "abcd"]
    write_split(tmp_path, "train", scenes, ["a.png", "b.png"])
    assert "'c.png' first" in refusal(tmp_path)
    write_split(tmp_path, "train", scenes[1:2])
    assert "'a.png' first" in refusal(tmp_path)
    (tmp_path / "scenes" / "CLEVR_train_scenes.json").unlink()
    with pytest.raises(FileNotFoundError, match="CLEVR_train_scenes"):
        open_source(str(tmp_path))


# Counted by eye in the pictures; the distances are those of the big blue cylinder, the cyan ball and the purple cube
# in front, as the scenes tell them.
COUNTED = {
    "CLEVR_train_000005.png": (9, 7.999714374542236),
    "CLEVR_train_000386.png": (6, 7.503600597381592),
    "CLEVR_train_000739.png": (8, 9.091358184814453),
}


def test_three_real_images_counted_by_eye(real_data):
    folder = real_data("clevr-sample")
    source = open_source(str(folder))
    assert len(source) == 267
    index = {source.image_name(index): index for index in range(len(source))}
    for name, (count, distance) in COUNTED.items():
        assert source.labels["count"][index[name]] == count
        assert source.labels["distance"][index[name]] == np.float32(distance)
        assert source.read(index[name]).shape == (3, 160, 240)
    assert (source.labels["count"].min(), source.labels["count"].max()) == (3, 10)
    # On the cyan ball: the right picture was read.
    red, green, blue = source.read(index["CLEVR_train_000386.png"])[:, 131, 126].tolist()
    assert red + 60 < min(green, blue)
    assert "'test': choose one of train." in refusal(folder, "test")
