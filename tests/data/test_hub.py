"""Data sets of the Hugging Face hub: splits, and what cannot be loaded."""

import pickle

import pyarrow as pa
import pytest
from written_images import assert_refused, encoded, shades, write

from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source

pytestmark = pytest.mark.usefixtures("own_folders")


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


@pytest.mark.usefixtures("hub")
def test_rows_without_bytes_name_files_in_the_caches_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for file in (tmp_path / "cache" / "a.png", tmp_path / "secret.png"):
        write(file, 8)
    (tmp_path / "cache" / "link.png").symlink_to(tmp_path / "secret.png")
    source = open_source("hf:owner/name")
    rows = [{"bytes": None, "path": str(tmp_path / file)} for file in ("cache/a.png", "secret.png", "cache/link.png")]
    source._opened[0] = pa.chunked_array([pa.array(rows)])
    assert int(source.read(0)[0, 0, 0]) == 8
    for index in (1, 2):
        with pytest.raises(BadImage, match="no image bytes"):
            source.read(index)


def test_the_test_split_of_a_hub_set_falls_back_to_validation(hub):
    source = open_source("hf:owner/name", "test")
    assert [split for _, _, split in hub] == ["test", "validation"]
    assert source.describe(0) == "hf:owner/name[validation]#0"
    assert_refused("hf:owner/name", "Unknown split", "extra")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("reachable", "words"),
    [
        (True, r"hf:owner/other .*Couldn't reach owner/other. No network\)"),
        (False, r"hf:owner/other is not in the cache .* cannot be reached"),
    ],
)
def test_a_hub_set_that_cannot_be_loaded(monkeypatch, reachable, words):
    monkeypatch.setattr("stop_mim.hub.is_reachable", lambda: reachable)
    assert_refused("hf:owner/other", words)
