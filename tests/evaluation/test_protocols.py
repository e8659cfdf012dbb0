"""The numbers of the paper's evaluations, and which dataset has which."""

import numpy as np
import PIL.Image
import pytest

from stop_mim.data.sources import open_source
from stop_mim.data.sources.folder import FileSource
from stop_mim.errors import InputError
from stop_mim.evaluation.data import count_classes, distance_classes
from stop_mim.evaluation.protocols import PROTOCOLS, choose_protocol, guess_protocol
from stop_mim.models.encoder import Dimensions, create_encoder

# The table of the paper's evaluations: classes, epochs, milestones (or a cosine), views.
CROPS, WHOLE = ("random_resized_crop", "resize_crop", "bicubic"), ("resize_flip", "resize", "bilinear")
TABLE = {
    "imagenet": ("class", 1000, 28, (8, 16, 24), CROPS),
    "places205": ("class", 205, 14, (4, 8, 12), CROPS),
    "inat18": ("class", 8142, 84, (24, 48, 72), CROPS),
    "cifar100": ("class", 100, 28, (8, 16, 24), WHOLE),
    "cifar100-crops": ("class", 100, 28, (8, 16, 24), CROPS),
    "clevr-count": ("count", 8, 50, (), WHOLE),
    "clevr-dist": ("distance", 6, 100, (), WHOLE),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_numbers_are_those_of_the_table(name):
    protocol = PROTOCOLS[name]
    views = (protocol.train_view, protocol.test_view, protocol.interpolation)
    assert (protocol.label, protocol.classes, protocol.epochs, protocol.milestones, views) == TABLE[name]
    # From 0.01 to 1e-4.
    assert protocol.final_factor == (0.01 if name.startswith("clevr") else None)
    assert (protocol.lrs, protocol.weight_decay, protocol.preconditioned) == ((0.01,), 5e-4, False)


def test_few_labels_of_imagenet_are_of_images_resized_straight_to_the_size():
    few = {name: protocol.with_few_labels() for name, protocol in PROTOCOLS.items()}
    changed = {name for name, protocol in few.items() if protocol != PROTOCOLS[name]}
    assert changed == {"imagenet"}
    view = few["imagenet"].test_view_of(create_encoder(Dimensions(24, 1, 2), image_size=224))
    assert (view.size, view.resize_to, view.interpolation) == ((224, 224), 224, "bilinear")


def test_other_data_have_learning_rates_to_choose_from_which_all_fall_to_zero():
    assert set(PROTOCOLS) == {*TABLE, "places365", "generic"}
    generic = PROTOCOLS["generic"]
    assert generic.preconditioned
    assert generic.final_factor == 0
    assert list(generic.lrs) == sorted(set(generic.lrs))
    assert max(generic.lrs) / min(generic.lrs) > 100
    assert (generic.train_view, generic.test_view, generic.interpolation) == CROPS


def test_images_of_the_encoders_size_are_seen_as_they_are(tmp_path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        PIL.Image.new("RGB", (32, 32)).save(tmp_path / str(number) / "image.png")
    source = open_source(str(tmp_path))
    assert choose_protocol("imagenet", source, "class", (32, 32)).test_view == "resize"
    assert choose_protocol("imagenet", source, "class", (64, 64)) is PROTOCOLS["imagenet"]
    assert choose_protocol("auto", source, "class", (64, 64)) is PROTOCOLS["generic"]
    with pytest.raises(InputError, match=r"'image-net': choose one of imagenet, .*generic"):
        choose_protocol("image-net", source, "class", (64, 64))


@pytest.mark.parametrize(
    ("name", "classes", "protocol"),
    [
        ("torchvision:CIFAR100", 100, "cifar100"),
        ("/data/cifar-100/train.parquet", 100, "cifar100"),
        ("/data/cifar-100-coarse", 20, "generic"),
        ("torchvision:Places365,small=true", 365, "places365"),
        ("torchvision:INaturalist,version=2018", 8142, "inat18"),
        ("/data/ImageNet-1k", 1000, "imagenet"),
        ("wds:/data/ILSVRC2012-{000..099}.tar", 1000, "imagenet"),
        ("/data/tiny-imagenet-100", 100, "generic"),
        ("/data/products", 1000, "generic"),
    ],
)
def test_data_sets_are_known_by_name_and_number_of_classes(tmp_path, name, classes, protocol):
    for names, labels in ((tuple(map(str, range(classes))), 1), ((), classes)):
        source = FileSource(tmp_path, [], name, {"class": np.arange(labels)}, names)
        assert guess_protocol(source) is PROTOCOLS[protocol]


@pytest.mark.parametrize(("layout", "classes"), [("places205", 205), ("inat18", 8142)])
def test_data_sets_are_known_by_their_layout(tmp_path, layout, classes):
    names = tuple(map(str, range(classes)))
    source = FileSource(tmp_path, [], "/data/mine", {"class": np.array([0])}, names, layout=layout)
    assert guess_protocol(source) is PROTOCOLS[layout]


def test_counts_and_distances_are_clevrs():
    source = open_source("scenes:count=1,size=32")
    assert guess_protocol(source, "count") is PROTOCOLS["clevr-count"]
    assert guess_protocol(source, "distance") is PROTOCOLS["clevr-dist"]
    assert int(count_classes(np.array([10]))) + 1 == PROTOCOLS["clevr-count"].classes
    assert int(distance_classes(np.array([99.0]))) + 1 == PROTOCOLS["clevr-dist"].classes
