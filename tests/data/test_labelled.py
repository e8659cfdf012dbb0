"""Labelled sets: what they refuse, and what is held out of them."""

import pickle

import numpy as np
import pytest
from painted_images import Painted

from stop_mim.data.labelled import LabelledSet, hold_out
from stop_mim.errors import InputError


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


def test_images_without_a_label_may_be_outside_the_set_alone():
    source = Painted()
    labels = source.classes.copy()
    labels[10:] = -1
    some = LabelledSet(source, labels, np.arange(10))
    assert len(some) == 10
    assert np.array_equal(some.part(np.array([3, 1])).classes, source.classes[[3, 1]])
    with pytest.raises(InputError, match="2 of the 12 chosen images of 'painted' have no label, such as image 10"):
        LabelledSet(source, labels, np.arange(12))


def test_the_fingerprint_tells_what_is_in_a_set():
    source = Painted()
    some = LabelledSet(source, source.classes, np.arange(10))
    others = [some.part(np.arange(9)), LabelledSet(source, source.classes + 1, np.arange(10))]
    assert len({data.fingerprint() for data in (some, *others)}) == 3
    assert pickle.loads(pickle.dumps(some)).fingerprint() == some.fingerprint()
