"""Places205 and iNaturalist: splits, labels, and lists that cannot be used."""

import json
import pickle
import re

import pytest
from written_images import one_sentence, shades, write

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source
from stop_mim.data.sources.folder import FileSource
from stop_mim.errors import InputError


def names(source):
    return [source.image_name(index) for index in range(len(source))]


def refusal(folder, split="train"):
    with pytest.raises(InputError) as error:
        open_source(str(folder), split)
    return one_sentence(error)


def test_the_order_is_the_lists_and_missing_files_are_bad_images(tmp_path):
    write(tmp_path / "b.png", 2)
    source = FileSource(tmp_path, ["b.png", "a/gone.png"], "listed")
    assert names(source) == ["b.png", "a/gone.png"]
    assert source.size(0) == (4, 6)
    for attempt in (source.read, source.size):
        with pytest.raises(BadImage, match=r"a/gone\.png: No such file"):
            attempt(1)
    before = source.fingerprint()
    assert pickle.loads(pickle.dumps(source)).fingerprint() == before
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
        (b"a/abbey/gsun_1.jpg -1\n", "has the line"),
        (b"../../secret.jpg 1\n", r"names the image '\.\./\.\./secret\.jpg': give paths within"),
        (b"a/\0.jpg 1\n", "names the image"),
        (b"\xff\xfe\x00 1\n", "names the image"),
        (b"a/abbey/gone.jpg 1\n", r"a/abbey/gone\.jpg, the first image of .*, is not there"),
    ],
)
def test_unusable_lists_of_places205_are_refused(tmp_path, content, message):
    write(tmp_path / "images256" / "a" / "abbey" / "gsun_1.jpg", 0)
    (tmp_path / "train_places205.csv").write_bytes(content)
    assert re.search(message, refusal(tmp_path))


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
    assert refusal(inaturalist, "test") == f"{inaturalist} has no split 'test': choose one of train."


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
    assert re.search(message, refusal(inaturalist))
    (inaturalist / "train2018.json").write_text("{")
    assert "JSONDecodeError" in refusal(inaturalist)
