"""CLEVR, Places205 and iNaturalist in their own layouts: labels of the right images, splits, and unusable lists."""

import json

import numpy as np
import pytest
from written_images import assert_refused, shades, write

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source
from stop_mim.data.sources.folder import FileSource


def names(source):
    return [source.image_name(index) for index in range(len(source))]


def test_the_order_is_the_lists_and_missing_files_are_bad_images(tmp_path):
    write(tmp_path / "b.png", 2)
    source = FileSource(tmp_path, ["b.png", "a/gone.png"], "listed")
    assert names(source) == ["b.png", "a/gone.png"]
    assert source.size(0) == (4, 6)
    for attempt in (source.read, source.size):
        with pytest.raises(BadImage, match=r"a/gone\.png: No such file"):
            attempt(1)
    before = source.fingerprint()
    write(tmp_path / "a" / "gone.png", 0)
    assert FileSource(tmp_path, ["b.png", "a/gone.png"], "listed").fingerprint() != before


# Places205


@pytest.fixture(params=["as published", "moved"])
def places205(request, tmp_path):
    published = request.param == "as published"
    images = tmp_path / ("data/vision/torralba/deeplearning/images256" if published else "images256")
    lists = tmp_path / "trainvalsplit_places205" if published else tmp_path
    for shade, file in enumerate(("a/abbey/gsun_1.jpg", "a/abbey/gsun_2.jpg", "w/wheat_field/gsun 3.jpg")):
        write(images / file, 10 * shade)
    lists.mkdir(exist_ok=True)
    (lists / "train_places205.csv").write_text("w/wheat_field/gsun 3.jpg 203\na/abbey/gsun_1.jpg 0\n")
    (lists / "val_places205.csv").write_bytes(b"a/abbey/gsun_2.jpg 0\r\n")
    return tmp_path


def test_places205_in_its_own_layout(places205):
    train, test = open_source(str(places205)), open_source(str(places205), "test")
    assert names(train) == ["w/wheat_field/gsun 3.jpg", "a/abbey/gsun_1.jpg"]
    assert train.labels["class"].tolist() == [203, 0]
    assert [round(shade, -1) for shade in shades(train)] == [20, 0]
    assert len(train.class_names) == 205
    assert (train.class_names[203], train.class_names[0]) == ("w/wheat_field", "a/abbey")
    assert names(test) == ["a/abbey/gsun_2.jpg"]
    assert test.labels["class"].tolist() == [0]
    assert train.layout == test.layout == "places205"
    assert train.name == str(places205)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a/abbey/gsun_1.jpg\n", "has the line 'a/abbey/gsun_1.jpg': give a path and a class from 0 to 204"),
        (b"a/abbey/gsun_1.jpg 205\n", "has the line 'a/abbey/gsun_1.jpg 205'"),
        (b"../../secret.jpg 1\n", r"names the image '\.\./\.\./secret\.jpg': give paths within"),
        (b"\xff\xfe\x00 1\n", "names the image"),
        (b"a/abbey/gone.jpg 1\n", r"a/abbey/gone\.jpg, the first image of "),
    ],
)
def test_unusable_lists_of_places205_are_refused(tmp_path, content, message):
    write(tmp_path / "images256" / "a" / "abbey" / "gsun_1.jpg", 0)
    (tmp_path / "train_places205.csv").write_bytes(content)
    assert_refused(tmp_path, message)


# iNaturalist 2018


def write_annotations(folder, split, files, **changed):
    content = {
        "info": {"year": 2018},
        "images": [{"id": 7 + number, "file_name": file} for number, (file, _) in enumerate(files)],
        # Not in the order of the images.
        "annotations": [{"image_id": 7 + number, "category_id": label} for number, (_, label) in enumerate(files)][
            ::-1
        ],
        "categories": [{"id": 1, "name": "Boletus edulis"}, {"id": 0, "name": "Anas acuta"}],
    }
    (folder / f"{split}2018.json").write_text(json.dumps(content | changed))


@pytest.fixture
def inaturalist(tmp_path):
    for shade, file in enumerate(("Aves/0/a.jpg", "Aves/0/b.jpg", "Fungi/1/c.jpg")):
        write(tmp_path / "train_val2018" / file, 10 * shade)
    write_annotations(tmp_path, "train", [("train_val2018/Fungi/1/c.jpg", 1), ("train_val2018/Aves/0/a.jpg", 0)])
    write_annotations(tmp_path, "val", [("train_val2018/Aves/0/b.jpg", 0)])
    return tmp_path


def test_inaturalist_in_its_own_layout(inaturalist):
    train, test = open_source(str(inaturalist)), open_source(str(inaturalist), "test")
    assert names(train) == ["Fungi/1/c.jpg", "Aves/0/a.jpg"]
    assert train.labels["class"].tolist() == [1, 0]
    assert [round(shade, -1) for shade in shades(train)] == [20, 0]
    assert train.class_names == ("Anas acuta", "Boletus edulis")
    assert names(test) == ["Aves/0/b.jpg"]
    assert test.labels["class"].tolist() == [0]
    assert train.layout == "inat18"
    (inaturalist / "val2018.json").unlink()
    assert_refused(inaturalist, "has no split 'test': choose one of train", "test")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": []}, "lists no images"),
        ({"images": [{"id": 99, "file_name": "x/a.jpg"}]}, "KeyError: 99"),
        ({"annotations": [{"image_id": 7, "category_id": 5}]}, "KeyError: 'category 5'"),
        ({"annotations": 3}, "cannot be read as annotations of iNaturalist"),
        ({"categories": [{"id": 1, "name": "only"}]}, "1 categories of .* are not numbered from 0"),
        ({"images": [{"id": 7, "file_name": "x/../../a.jpg"}]}, "give paths within the folder"),
        ({"images": [{"id": 7, "file_name": "x/\ud800.jpg"}]}, "give paths within the folder"),
        ({"images": [{"id": 7, "file_name": "x/Aves/0/gone.jpg"}]}, r"Aves/0/gone\.jpg, the first image of"),
    ],
)
def test_unusable_annotations_are_refused(inaturalist, changed, message):
    write_annotations(inaturalist, "train", [("train_val2018/Fungi/1/c.jpg", 1)], **changed)
    assert_refused(inaturalist, message)
    (inaturalist / "train2018.json").write_text("{")
    assert_refused(inaturalist, "JSONDecodeError")


# CLEVR


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


def test_labels_belong_to_the_images_of_their_names(clevr):
    # Neither is an image.
    (clevr / "images" / "train" / "._CLEVR_train_000000.png").write_bytes(b"")
    (clevr / "images" / "train" / "LICENSE.txt").write_text("CC BY 4.0")
    source = open_source(str(clevr))
    assert source.layout == "clevr"
    assert names(source) == ["CLEVR_train_000000.png", "CLEVR_train_000002.png"]
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
    assert_refused(clevr, "'extra': choose one of train, val", "extra")


def test_labels_enter_the_fingerprint(clevr):
    before = open_source(str(clevr)).fingerprint()
    path = clevr / "scenes" / "CLEVR_train_scenes.json"
    path.write_text(path.read_text().replace("9.25", "9.5"))
    assert open_source(str(clevr)).fingerprint() != before


def test_a_folder_of_classes_called_images_and_scenes_is_not_clevr(tmp_path):
    for name in ("images", "scenes"):
        write(tmp_path / name / "a.png", 0)
    assert open_source(str(tmp_path)).class_names == ("images", "scenes")


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\xff",
        b"[" * 100_000,
        b'{"scenes": []}',
        b'{"scenes": [{"image_filename": "a.png", "objects": null}]}',
        b'{"scenes": [{"image_filename": "a.png", "objects": [{"shape": "cube"}]}]}',
        b'{"scenes": [{"image_filename": "a.png", "objects": [{"pixel_coords": [1, 2]}]}]}',
        b'{"scenes": [{"image_filename": "a.png", "objects": [{"pixel_coords": [1, 2, NaN]}]}]}',
    ],
)
def test_files_that_are_no_scenes_are_refused(clevr, content):
    (clevr / "scenes" / "CLEVR_train_scenes.json").write_bytes(content)
    assert_refused(clevr, r"CLEVR_train_scenes\.json")


def test_images_and_scenes_must_be_the_same(tmp_path):
    write_split(tmp_path, "train", [scene("a.png", [9])] * 2)
    assert_refused(tmp_path, "a.png has a second scene")
    scenes = [scene(f"{letter}.png", [9]) for letter in "abcd"]
    write_split(tmp_path, "train", scenes, ["a.png", "b.png"])
    assert_refused(tmp_path, "'c.png' first")
    write_split(tmp_path, "train", scenes[1:2])
    assert_refused(tmp_path, "'a.png' first")
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
    assert_refused(folder, "'test': choose one of train", "test")
