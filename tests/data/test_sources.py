import io
import json
import os
import pickle
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stop_mim.data import parquets, scenes
from stop_mim.data.images import BadImage
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError, MissingExtra


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setenv("STOP_MIM_DATA", str(tmp_path / ".data"))


def encoded(shade, kind="PNG", size=(6, 4)):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, (shade, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def shades(source):
    return [int(source.read(index)[0, 0, 0]) for index in range(len(source))]


def write(path, shade, kind="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(shade, kind))


def write_parquet(path, image_shades, labels=None, names=None, column="image", plain=False):
    cells = [encoded(shade) for shade in image_shades]
    kind = pa.binary() if plain else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {column: pa.array(cells if plain else [{"bytes": cell, "path": "x.png"} for cell in cells], kind)}
    if labels is not None:
        columns["label"] = pa.array(labels)
    table = pa.table(columns)
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, content in samples:
            add_member(archive, name, content)


def one_sentence(error):
    message = str(error.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message


# Names


@pytest.mark.parametrize("name", ["nowhere", "", "nowhere/*.parquet", "hf:", "imagenet:train"])
def test_an_unknown_name_is_told_what_names_there_are(name):
    with pytest.raises(InputError) as error:
        open_source(name)
    message = one_sentence(error)
    for kind in ("scenes", "folder", "parquet", "torchvision:", "hf:", "wds:"):
        assert kind in message


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    write(tmp_path / "a.png", 1)
    with pytest.raises(InputError, match=r"a\.png is no data set"):
        open_source(str(tmp_path / "a.png"))


# Folders


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
    with pytest.raises(IndexError):
        source.read(-1)
    with pytest.raises(IndexError):
        source.size(3)


def test_a_flat_folder_has_no_labels(tmp_path):
    for shade in (2, 1):
        write(tmp_path / f"{shade}.png", shade)
    source = open_source(str(tmp_path))
    assert source.labels == {}
    assert source.class_names == ()
    assert shades(source) == [1, 2]


def test_bad_files_in_a_folder_are_bad_images(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    write(tmp_path / "gone.png", 1)
    source = open_source(str(tmp_path))
    (tmp_path / "gone.png").unlink()
    for index, reason in ((0, "empty"), (1, "No such file")):
        for attempt in (source.read, source.size):
            with pytest.raises(BadImage, match=reason) as error:
                attempt(index)
            assert error.value.name == source.describe(index)


def test_images_on_both_levels_are_refused(tmp_path):
    write(tmp_path / "a.png", 1)
    write(tmp_path / "cat" / "b.png", 2)
    with pytest.raises(InputError, match=r"both at its top \(a\.png\) and in sub-folders") as error:
        open_source(str(tmp_path))
    one_sentence(error)


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(InputError, match="holds no images") as error:
        open_source(str(tmp_path))
    one_sentence(error)


def test_split_folders(tmp_path):
    write(tmp_path / "train" / "ant" / "a.png", 1)
    write(tmp_path / "train" / "bee" / "b.png", 2)
    write(tmp_path / "val" / "bee" / "c.png", 3)
    assert shades(open_source(str(tmp_path))) == [1, 2]
    test = open_source(str(tmp_path), "test")
    assert shades(test) == [3]
    assert test.labels["class"].tolist() == [1]
    assert test.image_name(0) == "bee/c.png"
    with pytest.raises(InputError, match=r"no split 'dev': choose one of train, val\."):
        open_source(str(tmp_path), "dev")
    write(tmp_path / "val" / "images" / "d.png", 4)
    with pytest.raises(InputError, match="images is no class of the training split"):
        open_source(str(tmp_path), "test")


def test_train_may_be_a_class(tmp_path):
    write(tmp_path / "plane" / "a.png", 1)
    write(tmp_path / "train" / "b.png", 2)
    assert open_source(str(tmp_path)).class_names == ("plane", "train")


def test_links_are_followed_without_looping(tmp_path):
    write(tmp_path / "elsewhere" / "a.png", 1)
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "cat" / "up").symlink_to(tmp_path / "set")
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


# Parquet


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


def test_a_folder_of_parquet_files_without_split_names_is_all_read(tmp_path):
    write_parquet(tmp_path / "part-1.parquet", [1])
    write_parquet(tmp_path / "part-2.parquet", [2])
    assert shades(open_source(str(tmp_path), "test")) == [1, 2]


@pytest.mark.parametrize(("column", "plain"), [("img", False), ("picture", False), ("picture", True)])
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
    with pytest.raises(InputError, match="cannot be read as parquet") as error:
        open_source(str(tmp_path / "text.parquet"))
    one_sentence(error)
    write_parquet(tmp_path / "p-1.parquet", [1])
    write_parquet(tmp_path / "p-2.parquet", [1], column="img")
    with pytest.raises(InputError, match="no column 'image' like that of"):
        open_source(str(tmp_path / "p-*.parquet"))
    write_parquet(tmp_path / "q-1.parquet", [1], [1])
    write_parquet(tmp_path / "q-2.parquet", [1])
    with pytest.raises(InputError, match="'label' is not the same"):
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


def test_rows_without_bytes(tmp_path):
    write(tmp_path / "kept.png", 8)
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": None, "path": str(tmp_path / "kept.png")}, {"bytes": None, "path": "gone.png"}, None]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "x.parquet")
    source = open_source(str(tmp_path / "x.parquet"))
    assert source.read(0)[0, 0, 0] == 8
    with pytest.raises(BadImage, match=r"x\.parquet#1: No such file"):
        source.read(1)
    with pytest.raises(BadImage, match=r"x\.parquet#2: the row holds no image"):
        source.read(2)


def test_large_parquet_sets_are_memory_mapped_and_converted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquets, "MEMORY_LIMIT", 1)
    monkeypatch.setattr(parquets, "_ROWS_A_BATCH", 2)
    write_parquet(tmp_path / "a.parquet", [1, 2, 3], [0, 1, 2], ["a", "b", "c"])
    write_parquet(tmp_path / "b.parquet", [4, 5], [3, 4])
    source = open_source(str(tmp_path / "*.parquet"))
    assert shades(source) == [1, 2, 3, 4, 5]
    converted = list((tmp_path / ".cache" / "arrow").iterdir())
    assert [path.name for path in converted] == [f"{source.fingerprint()}.arrow"]
    written = converted[0].stat().st_mtime_ns
    assert shades(open_source(str(tmp_path / "*.parquet"))) == [1, 2, 3, 4, 5]
    assert converted[0].stat().st_mtime_ns == written


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(parquets, "MEMORY_LIMIT", 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "file"))
    write_parquet(tmp_path / "a.parquet", [1])
    with pytest.raises(InputError, match="set STOP_MIM_CACHE") as error:
        open_source(str(tmp_path / "a.parquet"))
    one_sentence(error)


def test_parquet_fingerprints(tmp_path):
    write_parquet(tmp_path / "one" / "a.parquet", [1, 2])
    write_parquet(tmp_path / "two" / "a.parquet", [1, 2])
    write_parquet(tmp_path / "three" / "a.parquet", [1, 3])
    one, two, three = (open_source(str(tmp_path / folder)).fingerprint() for folder in ("one", "two", "three"))
    assert one == two
    assert one != three


# Shards


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
    with pytest.raises(IndexError):
        source.read(3)


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
    with pytest.raises(InputError, match=r"3 of the 3 shards .* are not there, .*s-0\.tar first") as error:
        open_source(f"wds:{tmp_path}/s-{{0..2}}.tar")
    one_sentence(error)
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        add_member(archive, "a.png", encoded(1))
    with pytest.raises(InputError, match="cannot be read as a tar file"):
        open_source(f"wds:{tmp_path}/packed.tar")
    write_shard(tmp_path / "text.tar", [("a.txt", b"text")])
    with pytest.raises(InputError, match="hold no images"):
        open_source(f"wds:{tmp_path}/text.tar")
    write_shard(tmp_path / "label.tar", [("a.png", encoded(1)), ("a.cls", b"cat")])
    with pytest.raises(InputError, match=r"label\.tar#a\.cls holds b'cat'"):
        open_source(f"wds:{tmp_path}/label.tar")


# The Hugging Face hub


@pytest.fixture
def hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["ant", "bee"])})
    rows = {"img": [{"bytes": encoded(shade), "path": None} for shade in (1, 2, 3)], "fine_label": [1, 0, 1]}
    splits = {"train": rows, "validation": {"img": rows["img"][:1], "fine_label": [0]}}
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        if name != "owner/name":
            raise FileNotFoundError(f"Couldn't reach {name}.\nNo network.")
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
        return datasets.Dataset.from_dict(splits[split], features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_hub_sets(hub):
    source = open_source("hf:owner/name:small")
    assert hub == [("owner/name", "small", "train")]
    assert shades(source) == [1, 2, 3]
    assert source.size(0) == (4, 6)
    assert source.labels["class"].tolist() == [1, 0, 1]
    assert source.class_names == ("ant", "bee")
    assert source.describe(2) == "hf:owner/name:small[train]#2"
    assert source.image_name(2) == "row-2"
    assert source.fingerprint() == open_source("hf:owner/name:small").fingerprint()
    assert source.fingerprint() != open_source("hf:owner/name:small", "test").fingerprint()
    assert shades(pickle.loads(pickle.dumps(source))) == [1, 2, 3]


def test_the_test_split_of_a_hub_set_falls_back_to_validation(hub):
    source = open_source("hf:owner/name", "test")
    assert [split for _, _, split in hub] == ["test", "validation"]
    assert source.describe(0) == "hf:owner/name[validation]#0"
    with pytest.raises(InputError, match="Unknown split"):
        open_source("hf:owner/name", "extra")


@pytest.mark.usefixtures("hub")
def test_a_hub_set_that_cannot_be_loaded():
    with pytest.raises(InputError, match=r"hf:owner/other .*Couldn't reach owner/other. No network\)") as error:
        open_source("hf:owner/other")
    one_sentence(error)


# Missing extras, scenes, workers


@pytest.mark.parametrize(
    ("package", "name", "extra"), [("datasets", "hf:owner/name", "hf"), ("braceexpand", "wds:a.tar", "wds")]
)
def test_missing_extras_are_named(monkeypatch, package, name, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs the package '{package}'.*stop-mim\[{extra}\]"):
        open_source(name)


@pytest.fixture
def drawn(monkeypatch):
    calls = []

    def load_scenes(count, size=64, seed=0, cache_folder=None, progress=None):
        calls.append((count, size, seed))
        images = torch.full((count, 3, size, size), len(calls), dtype=torch.uint8)
        return SimpleNamespace(images=images, counts=torch.arange(count), nearest_distances=torch.rand(count))

    monkeypatch.setattr(scenes, "load_scenes", load_scenes, raising=False)
    return calls


def test_scenes(drawn):
    source = open_source("scenes:count=10,size=32")
    assert drawn == [(10, 32, 0)]
    assert source.stacked().shape == (10, 3, 32, 32)
    assert torch.equal(source.read(3), source.stacked()[3])
    assert source.size(3) == (32, 32)
    assert source.labels["count"].dtype == np.int64
    assert source.labels["distance"].dtype == np.float32
    assert source.class_names == ()
    assert source.describe(3) == "scenes:count=10,size=32,seed=0#3"
    assert source.image_name(3) == "scene-3"
    with pytest.raises(IndexError):
        source.read(-1)


def test_the_test_scenes_are_others(drawn):
    test = open_source("scenes:count=10,size=32,seed=4", "test")
    assert len(test) == 2
    assert drawn[0][2] > 2**30
    assert test.fingerprint() != open_source("scenes:count=2,size=32,seed=4").fingerprint()
    open_source("scenes:size=32,count=3")
    assert drawn[-1] == (3, 32, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scenes:colour=3", "no option 'colour': choose among count, size, seed"),
        ("scenes:count=many", "option count of scenes is 'many'"),
        ("scenes:count=0", "option count of scenes is '0'"),
        ("scenes:size", "option size of scenes is ''"),
    ],
)
@pytest.mark.usefixtures("drawn")
def test_scene_options_are_checked(name, message):
    with pytest.raises(InputError, match=message) as error:
        open_source(name)
    one_sentence(error)


def test_real_scenes():
    train, test = open_source("scenes:count=5,size=32"), open_source("scenes:count=5,size=32", "test")
    assert (len(train), len(test)) == (5, 1)
    assert train.read(4).shape == (3, 32, 32)
    assert train.labels["count"].min() >= 1
    assert not torch.equal(train.read(0), test.read(0))
    assert train.fingerprint() == open_source("scenes:count=5,size=32").fingerprint()


@pytest.mark.usefixtures("drawn")
def test_sources_can_be_pickled(tmp_path):
    write(tmp_path / "folder" / "cat" / "a.png", 1)
    write_parquet(tmp_path / "x.parquet", [5, 6, 7], [1, 0, 1])
    write_shard(tmp_path / "s.tar", [("a.png", encoded(1)), ("a.cls", b"7")])
    shard = f"wds:{tmp_path}/s.tar"
    for name in (str(tmp_path / "folder"), str(tmp_path / "x.parquet"), shard, "scenes:count=2"):
        source = open_source(name)
        copy = pickle.loads(pickle.dumps(source))
        assert torch.equal(copy.read(0), source.read(0))
        assert copy.fingerprint() == source.fingerprint()
        assert copy.name == source.name
        assert {key: value.tolist() for key, value in copy.labels.items()} == {
            key: value.tolist() for key, value in source.labels.items()
        }


def test_pickled_tables_leave_the_images_behind(tmp_path):
    write_parquet(tmp_path / "x.parquet", list(range(250)))
    assert len(pickle.dumps(open_source(str(tmp_path / "x.parquet")))) < 3000


class Shades(torch.utils.data.Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source.read(index)[0, 0, 0]


@pytest.mark.parametrize("kind", ["parquet", "shard"])
def test_sources_work_in_forked_workers(tmp_path, kind):
    write_parquet(tmp_path / "x.parquet", range(8))
    write_shard(tmp_path / "s.tar", [(f"{shade}.png", encoded(shade)) for shade in range(8)])
    source = open_source(str(tmp_path / "x.parquet") if kind == "parquet" else f"wds:{tmp_path}/s.tar")
    loader = torch.utils.data.DataLoader(Shades(source), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == list(range(8))
