"""Labelled sets: what they refuse, and what is held out of them; the old ways of reading them read batches."""

import pickle

import numpy as np
import pytest
import torch
from painted_images import Painted, read_colours

from stop_mim.data.augment import AugmentConfig, RandomCrop
from stop_mim.data.bad_images import BadImages
from stop_mim.data.labelled import LabelledBatches, LabelledSet, hold_out, labelled_views
from stop_mim.errors import InputError

CPU = torch.device("cpu")


def uneven_set(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    source = Painted(len(labels))
    return LabelledSet(source, np.random.default_rng(0).permutation(labels), np.arange(len(labels)))


def test_every_class_is_held_out_in_proportion():
    data = uneven_set([100, 40, 20, 1, 39])
    remains, held = hold_out(data, 0.1, 10_000, seed=0)
    assert sorted([*remains.indices, *held.indices]) == list(range(200))
    assert len(held) == 20
    assert np.abs(np.bincount(held.classes, minlength=5) - [10, 4, 2, 0, 4]).max() <= 1
    assert set(remains.classes) == {0, 1, 2, 3, 4}
    again, other = hold_out(data, 0.1, 10_000, seed=0)[1], hold_out(data, 0.1, 10_000, seed=1)[1]
    assert np.array_equal(again.indices, held.indices)
    assert not np.array_equal(other.indices, held.indices)


def test_an_image_of_each_class_remains_and_no_more_than_allowed_are_held_out():
    remains, held = hold_out(uneven_set([2, 2, 2, 2]), 0.99, 10_000, seed=0)
    assert np.bincount(remains.classes).tolist() == np.bincount(held.classes).tolist() == [1, 1, 1, 1]
    assert len(hold_out(uneven_set([50, 50]), 0.5, 7, seed=0)[1]) == 7
    assert len(hold_out(uneven_set([5, 5]), 0.01, 10_000, seed=0)[1]) == 1
    with pytest.raises(InputError, match="one image a class"):
        hold_out(uneven_set([1, 1]), 0.5, 10_000, seed=0)


@pytest.mark.parametrize(
    ("labels", "indices", "message"),
    [
        (np.zeros(5, dtype=np.int64), np.arange(5), "'painted' has 60 images and int64 labels of shape"),
        (np.zeros(60), np.arange(5), "float64 labels"),
        (np.zeros(60, dtype=np.int64), np.arange(0), "'painted' is empty"),
        (np.zeros(60, dtype=np.int64), np.array([1, 60]), "There is no image 60"),
        (np.zeros(60, dtype=np.int64), np.array([-1]), "There is no image -1"),
        (np.zeros(60, dtype=np.int64), np.array([0.5]), "The indices are float64"),
        (np.zeros(60, dtype=np.int64), np.array([1, 2, 1]), "an image twice"),
        (np.full(60, -1), np.arange(5), "5 of the 5 chosen images of 'painted' have no label, such as image 0"),
    ],
)
def test_a_set_that_cannot_be_is_refused_in_one_sentence(labels, indices, message):
    with pytest.raises(InputError, match=message) as error:
        LabelledSet(Painted(), labels, indices)
    assert str(error.value).count(". ") == 0


def test_images_without_a_label_may_be_outside_the_set_and_its_name_tells_what_is_in_it():
    source = Painted()
    labels = source.classes.copy()
    labels[10:] = -1
    some = LabelledSet(source, labels, np.arange(10))
    assert len(some) == 10
    assert np.array_equal(some.part(np.array([3, 1])).classes, source.classes[[3, 1]])
    others = [some.part(np.arange(9)), LabelledSet(source, labels + (labels >= 0), np.arange(10))]
    assert len({data.fingerprint() for data in (some, *others)}) == 3
    assert pickle.loads(pickle.dumps(some)).fingerprint() == some.fingerprint()


@pytest.mark.parametrize("crop", [True, False])
def test_an_epoch_has_every_image_of_the_set_with_its_label(crop):
    source, images = Painted(bad=(7,)), np.arange(5, 40)
    data, view = LabelledSet(source, source.classes, images), RandomCrop(AugmentConfig(), (8, 8))
    batches = LabelledBatches(data, view, CPU, 8, crop=crop, bad_images=BadImages("painted", 10_000))
    for epoch in (0, 3):
        seen = [(read_colours(shown), labels) for shown, labels in batches.epoch(epoch)]
        assert len(seen) == len(batches)
        assert all(painted == labels.tolist() for (_, painted), labels in seen)
        assert sorted(index for (numbers, _), _ in seen for index in numbers) == [5, 6, *range(8, 40)]


def test_views_come_with_their_places():
    source, images = Painted(bad=(17,)), np.arange(59, 9, -1)
    views = labelled_views(source, images, (8, 8), None, CPU, 7, 0, BadImages("painted", 10_000))
    found = [(images[places.numpy()].tolist(), pixels[:, 0, 0, 0].tolist()) for places, pixels in views]
    assert all(expected == shown for expected, shown in found)
    assert [index for _, shown in found for index in shown] == [*range(59, 17, -1), *range(16, 9, -1)]
