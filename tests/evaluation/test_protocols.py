import dataclasses

import numpy as np
import PIL.Image
import pytest

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import open_source
from stop_mim.data.sources.folder import FileSource as ListedSource
from stop_mim.errors import InputError
from stop_mim.evaluation.clevr import count_classes, distance_classes
from stop_mim.evaluation.protocols import (
    PROTOCOLS,
    find_protocol,
    fitted,
    guess_protocol,
    number_of_classes,
)

# The table of the paper's evaluations: classes, epochs, milestones (or a cosine), views.
CROPS, WHOLE = ("random_resized_crop", "resize_crop"), ("resize_flip", "resize")
TABLE = {
    "imagenet": ("class", 1000, 28, (8, 16, 24), CROPS),
    "places205": ("class", 205, 14, (4, 8, 12), CROPS),
    "inat18": ("class", 8142, 84, (24, 48, 72), CROPS),
    "cifar100": ("class", 100, 28, (8, 16, 24), WHOLE),
    "clevr-count": ("count", 8, 50, (), WHOLE),
    "clevr-dist": ("distance", 6, 100, (), WHOLE),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_numbers_are_those_of_the_table(name):
    protocol = find_protocol(name)
    views = (protocol.train_view, protocol.test_view)
    assert (protocol.label, protocol.classes, protocol.epochs, protocol.lr_milestones, views) == TABLE[name]
    assert protocol.cosine_final_lr == (1e-4 if name.startswith("clevr") else None)


def test_all_published_protocols_share_the_optimiser():
    assert set(PROTOCOLS) == {*TABLE, "places365", "generic"}
    for name, protocol in PROTOCOLS.items():
        assert protocol.name == name
        assert (protocol.momentum, protocol.nesterov, protocol.lr_batch_size) == (0.9, True, 256)
        if name != "generic":
            assert (protocol.lrs, protocol.lr, protocol.weight_decay) == ((0.01,), 0.01, 5e-4)
            assert not protocol.preconditioned


def test_other_data_have_learning_rates_to_choose_from_which_all_fall_to_zero():
    generic = find_protocol("generic")
    assert generic.preconditioned
    assert generic.cosine_final_lr == 0
    assert list(generic.lrs) == sorted(set(generic.lrs))
    assert max(generic.lrs) / min(generic.lrs) > 100
    assert generic.weight_decay < find_protocol("imagenet").weight_decay
    assert (generic.train_view, generic.test_view) == CROPS


def test_a_protocol_has_one_schedule_and_cannot_be_changed():
    protocol = find_protocol("imagenet")
    with pytest.raises(dataclasses.FrozenInstanceError):
        protocol.epochs = 1
    for changed in ({"lr_milestones": ()}, {"cosine_final_lr": 1e-4}):
        with pytest.raises(InputError, match="needs either lr_milestones or cosine_final_lr"):
            dataclasses.replace(protocol, **changed)
    with pytest.raises(InputError, match="epochs of the protocol imagenet are 0"):
        dataclasses.replace(protocol, epochs=0)


def test_unknown_names_are_told_which_there_are():
    with pytest.raises(InputError, match=r"no protocol 'image-net': choose one of imagenet, .*clevr-dist, generic\."):
        find_protocol("image-net")


# Views


def test_images_of_the_encoders_size_are_seen_as_they_are(tmp_path):
    for number in range(3):
        PIL.Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
    source = open_source(str(tmp_path))
    assert fitted(find_protocol("imagenet"), source, (32, 32)).test_view == "resize"
    assert fitted(find_protocol("imagenet"), source, (64, 64)) is find_protocol("imagenet")


# Guesses


class Labelled(ImageSource):
    """A source that has a name and labels, and no images."""

    def __len__(self):
        return len(self.labels)

    def read(self, index):
        raise AssertionError("nothing here needs it")

    size = describe = fingerprint = read


def labelled(name, classes, named=False):
    names = tuple(map(str, range(classes))) if named else ()
    return Labelled(name, {"class": np.arange(1 if named else classes)}, names)


@pytest.mark.parametrize(
    ("name", "classes", "protocol"),
    [
        ("torchvision:CIFAR100", 100, "cifar100"),
        ("/data/cifar-100/train.parquet", 100, "cifar100"),
        ("hf:uoft-cs/cifar100", 100, "cifar100"),
        ("torchvision:CIFAR10", 10, "generic"),
        ("/data/cifar-100-coarse", 20, "generic"),
        ("torchvision:Places365", 365, "places365"),
        ("torchvision:Places365,small=true", 365, "places365"),
        ("/data/places205", 205, "places205"),
        ("torchvision:INaturalist,version=2018", 8142, "inat18"),
        ("torchvision:INaturalist,version=2021_train", 10_000, "generic"),
        ("/data/ImageNet-1k", 1000, "imagenet"),
        ("wds:/data/ILSVRC2012-{000..099}.tar", 1000, "imagenet"),
        ("/data/tiny-imagenet-100", 100, "generic"),
        ("/data/products", 1000, "generic"),
    ],
)
def test_data_sets_are_known_by_name_and_number_of_classes(name, classes, protocol):
    for named in (True, False):
        source = labelled(name, classes, named)
        assert number_of_classes(source) == classes
        assert guess_protocol(source) is PROTOCOLS[protocol]


@pytest.mark.parametrize(("layout", "classes"), [("places205", 205), ("inat18", 8142)])
def test_data_sets_are_known_by_their_layout(tmp_path, layout, classes):
    names = tuple(map(str, range(classes)))
    source = ListedSource(tmp_path, ["a.jpg"], "/data/mine", {"class": np.array([0])}, names, layout=layout)
    assert guess_protocol(source) is PROTOCOLS[layout]


def test_counts_and_distances_are_clevrs():
    source = open_source("scenes:count=1,size=32")
    assert guess_protocol(source) is PROTOCOLS["clevr-count"]
    assert int(count_classes(np.array([10]))) + 1 == PROTOCOLS["clevr-count"].classes
    assert int(distance_classes(np.array([99.0]))) + 1 == PROTOCOLS["clevr-dist"].classes


def test_data_without_classes_have_no_protocol():
    with pytest.raises(InputError, match="named has no classes"):
        guess_protocol(Labelled("named"))


def test_real_data(real_data):
    assert guess_protocol(open_source(str(real_data("cifar-100")), "test")).name == "cifar100"
    assert guess_protocol(open_source(str(real_data("tiny-imagenet-100")), "val")).name == "generic"
    assert guess_protocol(open_source(str(real_data("clevr-sample")))).name == "clevr-count"
