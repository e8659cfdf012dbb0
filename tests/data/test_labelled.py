"""Labelled sets: what they refuse, what is held out of them, lists of images by name, and draws from each class."""

import pickle

import numpy as np
import pytest
from painted_images import Painted
from written_images import one_sentence

from stop_mim.data.image_source import ImageSource
from stop_mim.data.labelled import LabelledSet, draw_fraction, draw_per_class, hold_out, read_image_list
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
    with pytest.raises(InputError, match="one image per class"):
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


# Lists


class Named(ImageSource):
    """A source that has names, and nothing else."""

    def __init__(self, *names):
        super().__init__("named")
        self.names = names

    def __len__(self):
        return len(self.names)

    def image_name(self, index):
        return self.names[index]

    def read(self, index):
        raise AssertionError("nothing here needs it")

    size = describe = fingerprint = read


IMAGENET = Named("n01/n01_5.JPEG", "n01/n01_10.JPEG", "n02/n02_5.JPEG", "n02/deep/n02_7.JPEG")


def write_list(tmp_path, content):
    path = tmp_path / "1percent.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def found(tmp_path, content, source=IMAGENET):
    return read_image_list(write_list(tmp_path, content), source).tolist()


@pytest.mark.parametrize(
    "line",
    [
        "n02/deep/n02_7.JPEG",  # the whole name
        "n02_7.JPEG",  # the file alone
        "./n02/deep/n02_7.JPEG",
        "n02/deep/n02_7",  # without extension
        "n02_7",
        "n02_7.webp",  # another coding of the image
        "  n02_7.JPEG\t",
    ],
)
def test_a_line_is_a_whole_name_or_a_file_up_to_the_extension(tmp_path, line):
    assert found(tmp_path, line) == [3]


def test_the_lists_of_the_releases_are_read_as_they_are(tmp_path):
    """SimCLR's 1percent.txt, which MSN, I-JEPA and StoP use too, for folders and for the hub's parquet files."""
    content = "n02096294_8485.JPEG\nn04235860_14959.JPEG\n"
    folders = Named("n02096294/n02096294_8485.JPEG", "n02096294/n02096294_848.JPEG", "n04235860/n04235860_14959.JPEG")
    parquet = Named(*(f"{name.split('/')[1][:-5]}_{name[:9]}.JPEG" for name in folders.names))
    assert parquet.names[0] == "n02096294_8485_n02096294.JPEG"
    assert found(tmp_path, content, folders) == found(tmp_path, content, parquet) == [0, 2]


def test_the_order_is_the_lists_and_blank_lines_comments_and_line_ends_do_not_matter(tmp_path):
    content = b"\xef\xbb\xbf# one percent\r\n\r\nn01_10.JPEG\r\n   # done\r\n  n01_5.JPEG"
    assert found(tmp_path, content) == [1, 0]


@pytest.mark.parametrize("line", ["dog/2.png", "1/2.png", "set/cat/2.png"])
def test_another_folder_is_another_image(tmp_path, line):
    with pytest.raises(InputError, match=f"1 of the 2 names .*'{line}' first"):
        found(tmp_path, f"cat/1.png\n{line}\n", Named("cat/1.png", "cat/2.png", "cat/1/2.png"))


def test_the_whole_name_is_preferred_to_the_file(tmp_path):
    assert found(tmp_path, "1.png", Named("cat/1.png", "1.png")) == [1]
    assert found(tmp_path, "photo.1", Named("photo.2.png", "photo.1.png")) == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a/1.png\nn09.JPEG\nn08.JPEG\n", "2 of the 3 names in .* 'n09.JPEG' first"),
        ("1.png", r"'1.png' .*'a/1.png' \(image 0\) and 'b/1.png' \(image 2\)"),
        ("2.png\na/1.png\nb/2", "'b/2.png' twice, as '2.png' and as 'b/2'"),
        ("\n# only a comment\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8 text"),
        (b"n01\0n02", "is not UTF-8 text"),
    ],
)
def test_unusable_lists_are_refused(tmp_path, content, message):
    path = write_list(tmp_path, content)
    with pytest.raises(InputError, match=message) as error:
        read_image_list(path, Named("a/1.png", "b/2.png", "b/1.png"))
    one_sentence(error)


# Draws

LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [200, 50, 7]))


def test_a_draw_has_so_many_of_each_class():
    chosen = draw_per_class(LABELS, 5, seed=0)
    assert chosen.dtype == np.int64
    assert np.bincount(LABELS[chosen]).tolist() == [5, 5, 0, 5]
    assert chosen.tolist() == sorted(set(chosen.tolist()))


def test_a_fraction_is_of_each_class_and_at_least_one():
    assert np.bincount(LABELS[draw_fraction(LABELS, 0.1, seed=0)]).tolist() == [20, 5, 0, 1]
    assert np.bincount(LABELS[draw_fraction(LABELS, 0.001, seed=0)]).tolist() == [1, 1, 0, 1]
    assert draw_fraction(LABELS, 1.0, seed=0).tolist() == list(range(len(LABELS)))
    # One percent of ImageNet: 13 images of a class of 1,300.
    assert np.bincount(LABELS[draw_fraction(LABELS, 13 / 200, seed=0)])[0] == 13


def test_draws_differ_and_can_be_repeated():
    draws = [draw_per_class(LABELS, 5, 0, draw).tolist() for draw in range(5)]
    assert len({tuple(draw) for draw in draws}) == 5
    assert draw_per_class(LABELS, 5, 0, 3).tolist() == draws[3]
    assert draw_per_class(LABELS, 5, 1, 3).tolist() != draws[3]
    # Golden: a published draw must stay what it was.
    assert draws[0] == [0, 9, 36, 37, 47, 55, 57, 76, 90, 124, 128, 131, 192, 213, 219]


def test_a_larger_draw_holds_the_smaller_ones():
    assert set(draw_per_class(LABELS, 2, 0, 2).tolist()) < set(draw_per_class(LABELS, 7, 0, 2).tolist())
    assert set(draw_fraction(LABELS, 0.1, 0, 2).tolist()) < set(draw_fraction(LABELS, 0.2, 0, 2).tolist())


def test_what_is_drawn_from_a_class_does_not_depend_on_the_others():
    without = np.where(LABELS == 1, 9, LABELS)
    before, after = draw_per_class(LABELS, 5, 0), draw_per_class(without, 5, 0)
    assert before[LABELS[before] == 0].tolist() == after[LABELS[after] == 0].tolist()
    assert before[LABELS[before] == 1].tolist() != after[LABELS[after] == 1].tolist()


def test_a_draw_of_more_than_a_class_has_is_refused():
    with pytest.raises(InputError, match=r"class 3 \(d\) has 7 images, fewer than the 8"):
        draw_per_class(LABELS, 8, 0, 0, ["a", "b", "c", "d"])
