"""Names of data sets, their extras, the scenes, and sources in other processes."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from written_images import encoded, one_sentence, write, write_parquet, write_shard

from stop_mim.data import scenes
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError, MissingExtra

pytestmark = pytest.mark.usefixtures("own_folders")


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
