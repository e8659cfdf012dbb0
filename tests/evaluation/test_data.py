"""Training and test images and their classes, from the names that a user gives."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stop_mim.errors import InputError
from stop_mim.evaluation.data import count_classes, distance_classes, open_task_data


def test_splits_of_a_folder(colours):
    (data,) = open_task_data(str(colours))
    assert (len(data.train), len(data.test), data.classes, data.held_out) == (48, 16, 4, False)
    assert data.train.classes.tolist() == np.repeat(range(4), 12).tolist()


def test_without_a_test_split_a_fifth_is_held_out(colours):
    (data,) = open_task_data(str(colours / "train"), seed=3)
    assert data.held_out
    assert len(data.test) == 10
    assert sorted([*data.train.indices, *data.test.indices]) == list(range(48))
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
    distances = np.array([0.1, 7.99, 8.0, 8.01, 8.49, 8.5, 9.0, 9.5, 9.99, 10.0, 10.01, 99.0])
    # VTAB: the last of these thresholds that is below the distance.
    thresholds = np.array([0.0, 8.0, 8.5, 9.0, 9.5, 10.0])
    assert distance_classes(distances).tolist() == [int(np.flatnonzero(thresholds < one).max()) for one in distances]


def write_parquet(path, colours, names):
    files = [file for name in names for file in sorted((colours / "train" / name).iterdir())]
    table = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [file.parent.name for file in files],
    }
    pq.write_table(pa.table(table), path)


def test_classes_of_two_files_are_matched_by_name(colours, tmp_path):
    write_parquet(tmp_path / "a.parquet", colours, ["blue", "green", "red"])
    write_parquet(tmp_path / "b.parquet", colours, ["red", "green"])
    (data,) = open_task_data(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert set(data.test.classes.tolist()) == {1, 2}
    with pytest.raises(InputError, match="class 'blue'"):
        open_task_data(str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet"))


def test_data_that_do_not_fit_are_refused(colours, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(colours / "train" / "red", flat)
    for arguments, message in (
        ((str(colours), None, "count"), "'count': choose one of class"),
        ((str(flat),), "no labels"),
        ((str(colours), str(flat)), "no label 'class'"),
    ):
        with pytest.raises(InputError, match=message):
            open_task_data(*arguments)
    for file in (colours / "train" / "red").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"class 2 \('red'\)"):
        open_task_data(str(colours))
    for other in ("blue", "green"):
        shutil.rmtree(colours / "train" / other)
    with pytest.raises(InputError, match="'class': give at least two classes"):
        open_task_data(str(colours / "train"))
