"""Datasets of torchvision: names, splits, options, and what cannot be opened."""

import pickle
import urllib.error

import PIL.Image
import pytest
import torch
import torchvision
from written_images import assert_refused, write

from stop_mim.data import decode
from stop_mim.data.decode import BadImage
from stop_mim.data.sources import open_source

pytestmark = pytest.mark.usefixtures("own_folders")


class TinyFake(torchvision.datasets.FakeData):
    def __init__(self):
        super().__init__(size=5, image_size=(3, 8, 6), num_classes=3)


class SplitFake(torchvision.datasets.VisionDataset):
    classes, mode = ("ant", "bee"), "L"

    def __init__(self, root, split="train", download=False):
        if split not in ("trainval", "test"):
            raise ValueError(f"Unknown value '{split}' for argument split.")
        if not download:
            raise RuntimeError("Dataset not found.")
        self.root, self.split, self._labels = root, split, [0, 1, 1]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise OSError("image file is truncated")
        return PIL.Image.new(self.mode, (6, 4), index + 10 * (self.split == "test")), self._labels[index]


@pytest.fixture
def own_sets(monkeypatch):
    for kind in (TinyFake, SplitFake):
        monkeypatch.setattr(torchvision.datasets, kind.__name__, kind, raising=False)


@pytest.mark.usefixtures("own_sets")
def test_torchvision_fake_data():
    source = open_source("torchvision:TinyFake")
    assert len(source) == 5
    assert source.read(4).shape == (3, 8, 6)
    assert source.size(4) == (8, 6)
    assert source.labels["class"].tolist() == [int(TinyFake()[index][1]) for index in range(5)]
    assert source.fingerprint() == open_source("torchvision:TinyFake").fingerprint()
    assert source.image_name(4) == "4"
    copy = pickle.loads(pickle.dumps(source))
    assert torch.equal(copy.read(0), source.read(0))
    assert copy.fingerprint() == source.fingerprint()


@pytest.mark.usefixtures("own_sets")
def test_torchvision_splits_downloads_and_bad_images(monkeypatch):
    train, test = open_source("torchvision:SplitFake"), open_source("torchvision:SplitFake", "test")
    assert train.class_names == ("ant", "bee")
    assert train.labels["class"].tolist() == [0, 1, 1]
    assert int(train.read(1).max()) == 1
    assert int(test.read(1).max()) == 11
    assert train.describe(1) == "torchvision:SplitFake[trainval]#1"
    with pytest.raises(BadImage, match=r"SplitFake\[test\]#2: image file is truncated"):
        test.read(2)
    monkeypatch.setattr(decode, "MAX_PIXELS", 3)
    with pytest.raises(BadImage, match="6x4 of more than 3 pixels"):
        train.read(0)
    monkeypatch.setattr(decode, "MAX_PIXELS", 24)
    monkeypatch.setattr(SplitFake, "mode", "F")
    with pytest.raises(BadImage, match="floating-point"):
        train.read(0)
    assert_refused("torchvision:SplitFake", "no split 'extra'", "extra")


def test_torchvision_names_that_cannot_be_opened(tmp_path, monkeypatch):
    assert_refused("torchvision:CIFR100", r"no dataset 'CIFR100': did you mean CIFAR100")
    assert_refused("torchvision:ImageNet", r"could not be opened .* \(")

    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torchvision.datasets.CIFAR100, "download", fail)
    assert_refused("torchvision:CIFAR100", r"CIFAR100 could not be opened .*no network.*STOP_MIM_DATA")


def test_torchvision_sets_without_classes_are_refused(monkeypatch):
    monkeypatch.setattr(TinyFake, "__getitem__", lambda *_: torch.zeros(2, 3, 4, 4))
    monkeypatch.setattr(torchvision.datasets, "TinyFake", TinyFake, raising=False)
    assert_refused("torchvision:TinyFake", "does not give pairs of an image and a class")


# Places365, as torchvision lays it out


@pytest.fixture
def places365(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.Places365, "_check_integrity", lambda *_: True)
    root = tmp_path / ".data"
    for number, file in enumerate(("a/airfield/1.jpg", "z/zen_garden/1.jpg")):
        write(root / "data_large_standard" / file, number)
    write(root / "val_large" / "Places365_val_00000001.jpg", 9)
    (root / "categories_places365.txt").write_text("/a/airfield 0\n/z/zen_garden 1\n")
    (root / "places365_train_standard.txt").write_text("/a/airfield/1.jpg 0\n/z/zen_garden/1.jpg 1\n")
    (root / "places365_val.txt").write_text("Places365_val_00000001.jpg 1\n")
    (root / "places365_test.txt").write_text("Places365_test_00000001.jpg\n")
    return root


@pytest.mark.usefixtures("places365")
def test_places365_tests_on_its_validation_split_since_test_has_no_labels():
    train, test = open_source("torchvision:Places365"), open_source("torchvision:Places365", "test")
    assert train.split == "train-standard"
    assert train.class_names == ("/a/airfield", "/z/zen_garden")
    assert train.labels["class"].tolist() == [0, 1]
    assert test.split == "val"
    assert test.labels["class"].tolist() == [1]


def test_places365_without_its_images_is_told(places365):
    (places365 / "val_large" / "Places365_val_00000001.jpg").unlink()
    assert_refused(
        "torchvision:Places365", r"first image of torchvision:Places365 cannot be read .*STOP_MIM_DATA", "test"
    )
