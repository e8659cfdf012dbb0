"""Parquet files: columns, labels, splits, large sets, unusable ones."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_images import assert_refused, encoded, shades, write, write_parquet

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source, parquet

pytestmark = pytest.mark.usefixtures("own_folders")


def test_a_parquet_file_with_names(tmp_path):
    write_parquet(tmp_path / "x.parquet", [5, 6, 7], [1, 0, 1], ["cat", "dog"])
    source = open_source(str(tmp_path / "x.parquet"))
    assert shades(source) == [5, 6, 7]
    assert source.labels["class"].tolist() == [1, 0, 1]
    assert source.labels["class"].dtype == np.int64
    assert source.class_names == ("cat", "dog")
    assert source.size(0) == (4, 6)
    assert source.describe(2) == f"{tmp_path / 'x.parquet'}#2"
    before = source.fingerprint()
    assert open_source(str(tmp_path / "x.parquet")).fingerprint() == before
    os.utime(tmp_path / "x.parquet", (1000, 2000))
    touched = open_source(str(tmp_path / "x.parquet"))
    assert touched.fingerprint() != before
    # A copy, which has another time, can be resumed from: its contents are the same.
    assert touched.fingerprint(times=False) == source.fingerprint(times=False)


def test_several_parquet_files_by_glob(tmp_path):
    write_parquet(tmp_path / "a.parquet", [1, 2, 3], [0, 1, 2])
    write_parquet(tmp_path / "b.parquet", [4, 5], [3, 4])
    source = open_source(str(tmp_path / "*.parquet"))
    assert shades(source) == [1, 2, 3, 4, 5]
    assert source.labels["class"].tolist() == [0, 1, 2, 3, 4]
    assert source.describe(3) == f"{tmp_path / 'b.parquet'}#0"
    assert source.class_names == ()


def test_a_folder_of_parquet_files_has_splits_by_name(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", [1])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", [2])
    write_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", [3])
    assert shades(open_source(str(tmp_path))) == [1, 2]
    assert shades(open_source(str(tmp_path), "test")) == [3]
    assert_refused(tmp_path, r"no split 'extra': choose one of train, validation\.", "extra")
    write_parquet(tmp_path / "parts" / "part-1.parquet", [1])
    write_parquet(tmp_path / "parts" / "part-2.parquet", [2])
    assert shades(open_source(str(tmp_path / "parts"), "test")) == [1, 2]


@pytest.mark.parametrize(("column", "plain"), [("img", False), ("picture", True)])
def test_image_columns_of_other_names_and_plain_bytes(tmp_path, column, plain):
    write_parquet(tmp_path / "x.parquet", [1, 2], column=column, plain=plain)
    source = open_source(str(tmp_path / "x.parquet"))
    assert shades(source) == [1, 2]
    assert source.labels == {}


@pytest.mark.parametrize("encode", [list, lambda labels: pa.array(labels).dictionary_encode()])
def test_string_labels_are_numbered_in_sorted_order(tmp_path, encode):
    write_parquet(tmp_path / "x.parquet", [1, 2, 3], encode(["dog", "ant", "dog"]))
    source = open_source(str(tmp_path / "x.parquet"))
    assert source.class_names == ("ant", "dog")
    assert source.labels["class"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("labels", [[0, None], [-1, -1], [[0], [1]], [0.5, 1.5]])
def test_labels_are_for_all_images_or_none(tmp_path, labels):
    write_parquet(tmp_path / "x.parquet", [1, 2], labels)
    assert open_source(str(tmp_path / "x.parquet")).labels == {}


def test_parquet_without_images_lists_its_columns(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "x.parquet")
    assert_refused(tmp_path / "x.parquet", r"no column of images.*text, label\.")
    pq.write_table(pa.table({"left": [b"a"], "right": [b"b"]}), tmp_path / "y.parquet")
    assert_refused(tmp_path / "y.parquet", r"more than one column of images.*left, right\.")
    pq.write_table(pa.Table.from_arrays([pa.array([b"a"])] * 2, ["image"] * 2), tmp_path / "z.parquet")
    assert_refused(tmp_path / "z.parquet", r"more than one column of images.*image, image\.")


def test_unusable_parquet_files_are_refused(tmp_path):
    write_parquet(tmp_path / "empty.parquet", [])
    assert_refused(tmp_path / "empty.parquet", "has no rows")
    (tmp_path / "text.parquet").write_text("no parquet, but long enough to have a footer")
    assert_refused(tmp_path / "text.parquet", r"text\.parquet cannot be read")
    write_parquet(tmp_path / "large.parquet", [1], pa.array([2**63], pa.uint64()))
    assert_refused(tmp_path / "large.parquet", "labels 'label' do not fit into 64 bits")
    write_parquet(tmp_path / "p-1.parquet", [1])
    write_parquet(tmp_path / "p-2.parquet", [1], column="img")
    assert_refused(tmp_path / "p-*.parquet", "no column 'image' like that of")
    write_parquet(tmp_path / "q-1.parquet", [1], [1])
    write_parquet(tmp_path / "q-2.parquet", [1])
    assert_refused(tmp_path / "q-*.parquet", "no column 'label' like that of")


def test_rows_are_named_by_their_paths_or_numbers(tmp_path):
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for file, paths in (("a", ["n01/x.JPEG", None]), ("b", ["", "y.png"])):
        rows = [{"bytes": encoded(1), "path": path} for path in paths]
        pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / f"{file}.parquet")
    source = open_source(str(tmp_path / "*.parquet"))
    assert [source.image_name(index) for index in range(4)] == ["n01/x.JPEG", "row-1", "row-2", "y.png"]
    write_parquet(tmp_path / "plain" / "x.parquet", [1, 2], plain=True)
    assert open_source(str(tmp_path / "plain")).image_name(1) == "row-1"


def test_rows_without_bytes_are_bad_images_whatever_file_they_name(tmp_path):
    write(tmp_path / "secret.png", 9)
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": None, "path": path} for path in ("secret.png", str(tmp_path / "secret.png"), None)]
    pq.write_table(pa.table({"image": pa.array([*rows, None], kind)}), tmp_path / "x.parquet")
    source = open_source(str(tmp_path / "x.parquet"))
    for row in range(4):
        with pytest.raises(BadImage, match=rf"x\.parquet#{row}: the row has no image bytes"):
            source.read(row)


def test_large_parquet_sets_are_memory_mapped_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MEMORY_LIMIT", 1)
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 2)
    write_parquet(tmp_path / "a.parquet", [1, 2, 3], [0, 1, 2], ["a", "b", "c"])
    write_parquet(tmp_path / "b.parquet", [4, 5], [3, 4])
    source = open_source(str(tmp_path / "*.parquet"))
    assert shades(source) == [1, 2, 3, 4, 5]
    converted = {path: path.stat().st_mtime_ns for path in (tmp_path / ".cache" / "arrow").glob("*.arrow")}
    assert len(converted) == 2
    assert shades(open_source(str(tmp_path / "*.parquet"))) == [1, 2, 3, 4, 5]
    assert all(path.stat().st_mtime_ns == written for path, written in converted.items())
