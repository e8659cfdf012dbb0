"""Parquet files: columns, labels, splits, large sets, unusable ones."""

import io
import os

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_images import encoded, one_sentence, shades, write, write_parquet

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source, parquet
from stop_mim.errors import InputError

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
    with pytest.raises(InputError, match=r"no split 'extra': choose one of train, validation\."):
        open_source(str(tmp_path), "extra")
    write_parquet(tmp_path / "parts" / "part-1.parquet", [1])
    write_parquet(tmp_path / "parts" / "part-2.parquet", [2])
    assert shades(open_source(str(tmp_path / "parts"), "test")) == [1, 2]


@pytest.mark.parametrize(("column", "plain"), [("img", False), ("picture", True)])
def test_image_columns_of_other_names_and_plain_bytes(tmp_path, column, plain):
    write_parquet(tmp_path / "x.parquet", [1, 2], column=column, plain=plain)
    source = open_source(str(tmp_path / "x.parquet"))
    assert shades(source) == [1, 2]
    assert source.labels == {}


def test_string_labels_are_numbered_in_sorted_order(tmp_path):
    write_parquet(tmp_path / "x.parquet", [1, 2, 3], ["dog", "ant", "dog"])
    source = open_source(str(tmp_path / "x.parquet"))
    assert source.class_names == ("ant", "dog")
    assert source.labels["class"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("labels", [[0, None], [-1, -1], [[0], [1]], [0.5, 1.5]])
def test_labels_are_for_all_images_or_none(tmp_path, labels):
    write_parquet(tmp_path / "x.parquet", [1, 2], labels)
    assert open_source(str(tmp_path / "x.parquet")).labels == {}


def test_parquet_without_images_lists_its_columns(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"no column of images.*text, label\.") as error:
        open_source(str(tmp_path / "x.parquet"))
    one_sentence(error)
    pq.write_table(pa.table({"left": [b"a"], "right": [b"b"]}), tmp_path / "y.parquet")
    with pytest.raises(InputError, match=r"more than one column of images.*left, right\."):
        open_source(str(tmp_path / "y.parquet"))


def test_unusable_parquet_files_are_refused(tmp_path):
    write_parquet(tmp_path / "empty.parquet", [])
    with pytest.raises(InputError, match="has no rows"):
        open_source(str(tmp_path / "empty.parquet"))
    (tmp_path / "text.parquet").write_text("no parquet, but long enough to have a footer")
    with pytest.raises(InputError, match=r"text\.parquet cannot be read") as error:
        open_source(str(tmp_path / "text.parquet"))
    one_sentence(error)
    write_parquet(tmp_path / "p-1.parquet", [1])
    write_parquet(tmp_path / "p-2.parquet", [1], column="img")
    with pytest.raises(InputError, match="no column 'image' like that of"):
        open_source(str(tmp_path / "p-*.parquet"))
    write_parquet(tmp_path / "q-1.parquet", [1], [1])
    write_parquet(tmp_path / "q-2.parquet", [1])
    with pytest.raises(InputError, match="no column 'label' like that of"):
        open_source(str(tmp_path / "q-*.parquet"))


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
        with pytest.raises(BadImage, match=rf"x\.parquet#{row}: the row holds no bytes"):
            source.read(row)


def test_large_parquet_sets_are_memory_mapped_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MEMORY_LIMIT", 1)
    monkeypatch.setattr(parquet, "_ROWS_A_BATCH", 2)
    write_parquet(tmp_path / "a.parquet", [1, 2, 3], [0, 1, 2], ["a", "b", "c"])
    write_parquet(tmp_path / "b.parquet", [4, 5], [3, 4])
    source = open_source(str(tmp_path / "*.parquet"))
    assert shades(source) == [1, 2, 3, 4, 5]
    converted = {path: path.stat().st_mtime_ns for path in (tmp_path / ".cache" / "arrow").glob("*.arrow")}
    assert len(converted) == 2
    assert shades(open_source(str(tmp_path / "*.parquet"))) == [1, 2, 3, 4, 5]
    assert all(path.stat().st_mtime_ns == written for path, written in converted.items())


def test_fingerprints_follow_the_contents(tmp_path):
    # Noise, so that all images have the same size in bytes.
    noise = [encoded_noise(seed) for seed in range(300)]
    for folder, images in (("one", noise), ("two", noise), ("shuffled", noise[::-1])):
        (tmp_path / folder).mkdir()
        table = pa.table({"image": images, "label": [0] * len(noise)})
        pq.write_table(table, tmp_path / folder / "a.parquet", compression="none", write_statistics=False)
        os.utime(tmp_path / folder / "a.parquet", (1000, 1000))

    def fingerprint(folder):
        return open_source(str(tmp_path / folder)).fingerprint()

    assert fingerprint("one") == fingerprint("two")
    assert (tmp_path / "one" / "a.parquet").stat().st_size == (tmp_path / "shuffled" / "a.parquet").stat().st_size
    assert fingerprint("one") != fingerprint("shuffled")
    before = fingerprint("two")
    os.utime(tmp_path / "two" / "a.parquet", (1000, 2000))
    assert fingerprint("two") != before


def encoded_noise(seed):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(buffer, "BMP")
    return buffer.getvalue()
