"""Names of datasets, the scenes, and sources in other processes."""

import pickle

import numpy as np
import pytest
import torch
from written_images import assert_refused, encoded, write, write_parquet, write_shard

from stop_mim.data.sources import open_source

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.mark.parametrize("name", ["nowhere", "", "nowhere/*.parquet", "~nobody-here/x", "hf:", "imagenet:train"])
def test_an_unknown_name_is_told_what_names_there_are(name):
    message = assert_refused(name)
    for kind in ("scenes", "folder", "parquet", "torchvision:", "hf:", "wds:"):
        assert kind in message


def test_scenes():
    source, test = open_source("scenes:count=10,size=32"), open_source("scenes:size=32,count=10", "test")
    assert source.stacked().shape == (10, 3, 32, 32)
    assert torch.equal(source.read(3), source.stacked()[3])
    assert source.size(3) == (32, 32)
    assert source.labels["count"].dtype == np.int64
    assert source.labels["count"].min() >= 1
    assert source.labels["distance"].dtype == np.float32
    assert source.class_names == ()
    assert source.describe(3) == "scenes:count=10,size=32,seed=0#3"
    assert source.image_name(3) == "scene-3"
    assert len(test) == 2
    assert not torch.equal(source.read(0), test.read(0))
    assert source.fingerprint() == open_source("scenes:count=10,size=32").fingerprint() != test.fingerprint()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scenes:colour=3", "'colour': choose among count, size, seed"),
        ("scenes:count=many", "count of scenes is 'many'"),
        ("scenes:count=0", "count of scenes is '0'"),
        ("scenes:count=99999999999", "count=99999999999' does not fit into memory"),
        ("scenes:size=31", "'31': .* at least 32"),
    ],
)
def test_scene_options_are_checked(name, message):
    assert_refused(name, message)


def test_sources_can_be_pickled(tmp_path):
    write(tmp_path / "folder" / "cat" / "a.png", 1)
    write_parquet(tmp_path / "x.parquet", [5, 6, 7], [1, 0, 1])
    write_shard(tmp_path / "s.tar", [("a.png", encoded(1)), ("a.cls", b"7")])
    shard = f"wds:{tmp_path}/s.tar"
    for name in (str(tmp_path / "folder"), str(tmp_path / "x.parquet"), shard, "scenes:count=2,size=32"):
        source = open_source(name)
        copy = pickle.loads(pickle.dumps(source))
        assert torch.equal(copy.read(0), source.read(0))
        assert copy.fingerprint() == source.fingerprint()
        assert copy.name == source.name
    # The images of a table stay behind.
    write_parquet(tmp_path / "large.parquet", list(range(250)))
    assert len(pickle.dumps(open_source(str(tmp_path / "large.parquet")))) < 3000
