"""Which images are for training and which for testing, and by which classes."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stop_mim.errors import InputError
from stop_mim.evaluation.clevr import count_classes, distance_classes
from stop_mim.evaluation.task_data import open_task_data


def test_splits_of_a_folder(colours):
    (data,) = open_task_data(str(colours))
    assert (len(data.train), len(data.test), data.classes, data.held_out) == (48, 16, 4, False)
    assert data.train.classes.tolist() == np.repeat(range(4), 12).tolist()


def test_without_a_test_split_a_fifth_is_held_out(colours):
    (data,) = open_task_data(str(colours / "train"), seed=3)
    assert data.held_out
    assert len(data.test) == 10
    assert not set(data.train.indices.tolist()) & set(data.test.indices.tolist())
    assert len(data.train) + len(data.test) == 48
    (other,) = open_task_data(str(colours / "train"), seed=4)
    assert other.test.indices.tolist() != data.test.indices.tolist()


def test_clevr_without_its_validation_split_is_held_out_too(real_data):
    count, distance = open_task_data(str(real_data("clevr-sample")))
    assert (count.label, distance.label) == ("count", "distance")
    assert count.held_out
    assert len(count.train) + len(count.test) == 267
    assert 0 <= count.train.classes.min() <= count.train.classes.max() <= 7
    assert distance.classes <= 6


def test_scenes_have_two_labellings():
    count, distance = open_task_data("scenes:count=40,size=32")
    assert (count.label, distance.label) == ("count", "distance")
    assert len(count.test) == 8
    (only,) = open_task_data("scenes:count=40,size=32", label="distance")
    assert only.label == "distance"


def test_classes_of_counts_and_distances():
    assert count_classes(np.array([3, 10])).tolist() == [0, 7]
    distances = np.array([0.0, 7.99, 8.0, 8.49, 8.5, 9.0, 9.5, 9.99, 10.0, 99.0])
    assert distance_classes(distances).tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]


def write_parquet(path, colours, names):
    files = [file for name in names for file in sorted((colours / "train" / name).iterdir())]
    table = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [file.parent.name for file in files],
    }
    pq.write_table(pa.table(table), path)


def test_classes_of_two_files_are_matched_by_name(colours, tmp_path):
    write_parquet(tmp_path / "a.parquet", colours, ["blue", "green", "red"])
    write_parquet(tmp_path / "b.parquet", colours, ["red"])
    (data,) = open_task_data(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert set(data.test.classes.tolist()) == {2}
    with pytest.raises(InputError, match=r"class 'blue' of the test data .* is not among"):
        open_task_data(str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet"))


def test_a_class_that_training_lacks_is_told(colours):
    for file in (colours / "train" / "red").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"class 2 \('red'\) of the test data"):
        open_task_data(str(colours))


def test_mistakes_are_told(colours, tmp_path):
    with pytest.raises(InputError, match="data is not given"):
        open_task_data("")
    with pytest.raises(InputError, match="has no label 'count': choose one of class"):
        open_task_data(str(colours), label="count")
    flat = tmp_path / "flat"
    shutil.copytree(colours / "train" / "red", flat)
    with pytest.raises(InputError, match=r"has no labels, which this evaluation needs: .* a name for every image"):
        open_task_data(str(flat))
    with pytest.raises(InputError, match="have no label 'class': give labelled test data"):
        open_task_data(str(colours), str(flat))
    for other in ("blue", "green", "yellow"):
        shutil.rmtree(colours / "train" / other)
    with pytest.raises(InputError, match=r"have the same label 'class'.*: give data of at least two classes"):
        open_task_data(str(colours / "train"))
