"""Labels stay with their images, whatever is read how and by whom, and whatever cannot be read."""

import itertools
import pickle

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms.v2 import CenterCrop, Compose, Resize
from torchvision.transforms.v2.functional import resize

from stop_mim.data import labelled, loader
from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, Augment, AugmentConfig
from stop_mim.data.bad_images import BadImages
from stop_mim.data.image_source import ImageSource
from stop_mim.data.images import BadImage
from stop_mim.data.labelled import EpochOrder, LabelledBatches, LabelledSet, hold_out, labelled_views
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

CPU = torch.device("cpu")
FLIP = AugmentConfig(crop_scale=(0.2, 1.0), flip_probability=0.5)
PLAIN = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
COUNT, BAD = 60, (0, 17, 18, 41, 59)
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))


class Painted(ImageSource):
    """Red is the number of the image, green its label (which has nothing to do with the number), blue grows rightwards."""

    def __init__(self, count=COUNT, bad=(), sizes=((10, 12),), in_memory=False):
        self.classes = np.random.default_rng(1).integers(0, 7, count)
        super().__init__("painted", {"class": self.classes})
        self.count, self.bad, self.sizes, self.in_memory, self.reads = count, set(bad), sizes, in_memory, []

    def __len__(self):
        return self.count

    def read(self, index):
        self.reads.append(index)
        if index in self.bad:
            raise BadImage(self.describe(index), "torn")
        height, width = self.size(index)
        pixels = torch.empty(3, height, width, dtype=torch.uint8)
        pixels[0], pixels[1] = index, int(self.classes[index]) * 30
        pixels[2] = torch.linspace(0, 255, width).to(torch.uint8)
        return pixels

    def size(self, index):
        return self.sizes[index % len(self.sizes)]

    def describe(self, index):
        return f"image {index}"

    def fingerprint(self):
        return "painted"

    def stacked(self):
        return torch.stack([self.read(index) for index in range(self.count)]) if self.in_memory else None


def whole_set(source, indices=None):
    return LabelledSet(source, source.classes, np.arange(len(source)) if indices is None else np.asarray(indices))


def batches(data, mode="auto", batch_size=8, config=FLIP, size=(8, 8), lenient=True, **options):
    # One bad image in a hundred is the most that is forgiven, and these sets are smaller.
    bad_images = BadImages("painted", 10_000) if lenient else None
    augment = Augment(config, size)
    return LabelledBatches(data, augment, CPU, batch_size, mode=mode, bad_images=bad_images, **options)


def read_colours(images):
    """Number and label, as the pixels tell them."""
    colours = ((images * STD + MEAN) * 255).mean(dim=(2, 3)).round()
    return colours[:, 0].int().tolist(), (colours[:, 1] / 30).round().int().tolist()


def visits(reader, epoch=0):
    """(number, painted label, given label) of every image of an epoch, in order."""
    seen = []
    for images, labels in reader.epoch(epoch):
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        seen += zip(*read_colours(images), labels.tolist(), strict=True)
    return seen


WAYS = [("resident", 0), ("streaming", 0), ("streaming", 2)]


@pytest.mark.parametrize(("mode", "workers"), WAYS)
@pytest.mark.parametrize("crop", [True, False])
@pytest.mark.parametrize("bad", [(), BAD])
def test_the_label_is_that_of_the_image_that_is_shown(mode, workers, crop, bad):
    source = Painted(bad=bad)
    reader = batches(whole_set(source), mode, workers=workers, crop=crop)
    for epoch in (0, 1):
        seen = visits(reader, epoch)
        assert all(painted == given == source.classes[number] for number, painted, given in seen)
        # Every good image once, none in the place of a bad one.
        assert sorted(number for number, _, _ in seen) == [n for n in range(COUNT) if n not in bad]
    assert len(reader.bad_images) == len(bad)


@pytest.mark.parametrize("mode", ["resident", "streaming"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_only_the_given_images_are_shown(mode, in_memory):
    source, indices = Painted(in_memory=in_memory), np.array([50, 3, 4, 29, 11, 30, 58])
    seen = visits(batches(whole_set(source, indices), mode, batch_size=3, workers=0))
    assert sorted(number for number, _, _ in seen) == sorted(indices.tolist())
    assert all(painted == given == source.classes[number] for number, painted, given in seen)


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_broken_files_in_the_middle_of_a_folder_shift_nothing(tmp_path, mode):
    source = Painted(120)
    for number in range(120):
        path = tmp_path / str(source.classes[number]) / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(source.read(number).permute(1, 2, 0).numpy()).save(path)
        if number == 60:
            path.write_bytes(path.read_bytes()[:60])
    folder = open_source(str(tmp_path))
    data = LabelledSet(folder, folder.labels["class"], np.arange(len(folder)))
    reader = batches(data, mode, workers=0, lenient=False)
    seen = visits(reader)
    assert all(painted == given for _, painted, given in seen)
    assert sorted(number for number, _, _ in seen) == [n for n in range(120) if n != 60]
    assert len(reader.bad_images) == 1


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_too_many_bad_images_are_refused(mode):
    with pytest.raises(InputError, match="of the 60 images of 'painted' cannot be used"):
        visits(batches(whole_set(Painted(bad=BAD)), mode, workers=0, lenient=False))


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_two_processes_share_an_epoch(mode):
    data = whole_set(Painted(bad=BAD))
    readers = [batches(data, mode, 4, workers=0, rank=rank, world_size=2) for rank in (0, 1)]
    assert len(readers[0]) == len(readers[1])
    alone = [visits_of(batch) for batch in batches(data, mode, 8, workers=0).epoch(2)]
    parts = [[visits_of(batch) for batch in reader.epoch(2)] for reader in readers]
    numbers = [{number for batch in part for number in batch} for part in parts]
    assert not numbers[0] & numbers[1]
    # Together they take the steps of a process alone.
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == [sorted(batch) for batch in alone]


def visits_of(batch):
    return read_colours(batch[0])[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_visits_every_image_once_in_batches_of_equal_number(world_size):
    for n_images, batch_size in itertools.product(range(world_size, 40), (1, 2, 3, 8)):
        orders = [EpochOrder(n_images, batch_size, 0, rank, world_size) for rank in range(world_size)]
        parts = [list(order.batches(5)) for order in orders]
        assert {len(order) for order in orders} == {len(part) for part in parts} == {len(orders[0])}
        assert sorted(torch.cat([batch for part in parts for batch in part]).tolist()) == list(range(n_images))
        # None is empty, and none has a single image where another choice was left: it has no statistics.
        least = min(2, batch_size) if n_images >= 2 * world_size else 1
        lengths = [len(batch) for part in parts for batch in part]
        assert least <= min(lengths)
        assert max(lengths) <= batch_size + 2


def test_fewer_images_than_processes_and_empty_batches_are_refused():
    with pytest.raises(InputError, match="There are 2 images for 3 processes"):
        EpochOrder(2, 4, world_size=3)
    with pytest.raises(InputError, match="batch_size is 0"):
        EpochOrder(2, 0)


@pytest.mark.parametrize(("mode", "workers"), WAYS)
def test_a_seed_fixes_everything_and_an_epoch_depends_on_no_other(mode, workers):
    data = whole_set(Painted(bad=BAD))
    state = torch.get_rng_state()

    def epoch(number, seed=0, reader=None):
        reader = reader or batches(data, mode, workers=workers, seed=seed)
        return torch.cat([images for images, _ in reader.epoch(number)])

    reader = batches(data, mode, workers=workers)
    first = epoch(0, reader=reader)
    next(iter(reader.epoch(1)))  # One that is given up after its first batch.
    assert torch.equal(epoch(2, reader=reader), epoch(2))
    assert torch.equal(epoch(0, reader=reader), first)
    assert not torch.equal(epoch(1), first)
    assert not torch.equal(epoch(0, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_change_nothing():
    data = whole_set(Painted(sizes=((10, 12), (20, 9))))
    one, two = (list(batches(data, "streaming", workers=workers).epoch(3)) for workers in (0, 2))
    for (images, labels), (others, other_labels) in zip(one, two, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_a_batch_larger_than_what_a_worker_reads_at_a_time_is_whole(monkeypatch):
    data = whole_set(Painted(bad=BAD))
    whole = [(images, labels) for images, labels in batches(data, "streaming", 25, workers=0).epoch(0)]
    monkeypatch.setattr(labelled, "IMAGES_A_PIECE", 4)
    pieces = [(images, labels) for images, labels in batches(data, "streaming", 25, workers=2).epoch(0)]
    assert [len(labels) for _, labels in whole] == [len(labels) for _, labels in pieces]
    assert sum(len(labels) for _, labels in whole) == COUNT - len(BAD)
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_without_a_crop_the_whole_image_is_seen_and_half_of_them_are_flipped(mode):
    source = Painted(sizes=((10, 12),))
    flips = []
    for images, _ in batches(whole_set(source), mode, config=FLIP, crop=False, workers=0).epoch(0):
        for number, image in zip(read_colours(images)[0], (images * STD + MEAN) * 255, strict=True):
            expected = resize(source.read(number), [8, 8], antialias=True).float()
            flipped = bool(image[2, 0, 0] > image[2, 0, -1])
            torch.testing.assert_close(image.flip(2) if flipped else image, expected, atol=1.01, rtol=0)
            flips.append(flipped)
    assert 0.3 < np.mean(flips) < 0.7


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_with_a_crop_different_parts_are_seen(mode):
    config = AugmentConfig(crop_scale=(0.2, 0.4))
    reader = batches(whole_set(Painted(sizes=((40, 40),))), mode, config=config, workers=0)
    blue = torch.cat([images for images, _ in reader.epoch(0)])[:, 2] * IMAGENET_STD[2]
    extent = blue.amax((1, 2)) - blue.amin((1, 2))
    # sqrt of 0.2 to 0.4 of the area, give or take the aspect ratio.
    assert 0.35 < extent.mean() < 0.7
    assert extent.std() > 0.03
    assert blue.mean((1, 2)).std() > 0.05


def test_images_of_one_size_become_resident_if_they_fit(monkeypatch):
    assert batches(whole_set(Painted())).mode == "resident"
    assert batches(whole_set(Painted(sizes=((10, 12), (12, 10)))), workers=0).mode == "streaming"
    needed = 20 * 3 * 10 * 12
    for budget, mode in ((needed, "resident"), (needed - 1, "streaming")):
        # It is the chosen part that has to fit.
        monkeypatch.setattr(loader, "resident_budget", lambda device, processes, budget=budget: budget)
        assert batches(whole_set(Painted(), range(20)), workers=0).mode == mode


def test_resident_images_are_read_once():
    source = Painted()
    reader = batches(whole_set(source, range(30)))
    for epoch in range(3):
        visits(reader, epoch)
    assert sorted(source.reads) == list(range(30))


def test_a_batch_of_bad_images_alone_is_empty_and_the_number_of_batches_stays():
    data = whole_set(Painted(4, bad=range(4)))
    reader = batches(data, "streaming", batch_size=2, workers=0)
    assert [(len(images), images.shape[1:], len(labels)) for images, labels in reader.epoch(0)] == [
        (0, (3, 8, 8), 0)
    ] * 2


@pytest.mark.parametrize("resize_to", [None, 16])
@pytest.mark.parametrize(
    ("sizes", "in_memory", "workers"),
    [(((20, 30),), True, 0), (((20, 30), (40, 24), (9, 60)), False, 0), (((20, 30), (40, 24), (9, 60)), False, 2)],
)
def test_views_are_those_of_torchvision(resize_to, sizes, in_memory, workers):
    source, indices = Painted(sizes=sizes, in_memory=in_memory), np.array([7, 5, 31, 2, 44])
    view = Resize((14, 12)) if resize_to is None else Compose([Resize(resize_to), CenterCrop((14, 12))])
    positions, views = zip(*labelled_views(source, indices, (14, 12), resize_to, CPU, 2, workers), strict=True)
    assert [part.tolist() for part in positions] == [[0, 1], [2, 3], [4]]
    for index, pixels in zip(indices.tolist(), torch.cat(views), strict=True):
        assert torch.equal(pixels, view(source.read(index)))


@pytest.mark.parametrize("workers", [0, 2])
def test_views_of_bad_images_are_left_out_and_positions_tell(workers):
    source, indices = Painted(bad=BAD), np.arange(10, 60)
    bad_images = BadImages("painted", 10_000)
    views = labelled_views(source, indices, (8, 8), None, CPU, 7, workers, bad_images)
    numbers, expected = [], []
    for positions, pixels in views:
        numbers += pixels[:, 0, 0, 0].tolist()
        expected += indices[positions].tolist()
    assert numbers == expected == [number for number in range(10, 60) if number not in BAD]
    assert len(bad_images) == 4


def test_views_are_read_as_they_are_taken():
    source = Painted(250)
    views = labelled_views(source, np.arange(250), (8, 8), None, CPU, batch_size=50, workers=0)
    next(views)
    assert len(source.reads) == 50
    assert sum(len(positions) for positions, _ in views) == 200


def test_views_of_nothing_are_none():
    for in_memory in (True, False):
        source = Painted(in_memory=in_memory)
        assert not list(labelled_views(source, np.empty(0, dtype=np.int64), (8, 8), None, CPU, workers=0))


def test_wrong_views_are_refused_at_once():
    source = Painted()
    with pytest.raises(InputError, match="There is no image 60 in 'painted'"):
        labelled_views(source, np.array([3, 60]), (8, 8), None, CPU)
    with pytest.raises(InputError, match="resize_to is 7: a crop"):
        labelled_views(source, np.array([3]), (8, 8), 7, CPU)
    with pytest.raises(InputError, match="batch_size is 0"):
        labelled_views(source, np.array([3]), (8, 8), None, CPU, 0)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_on_the_gpu_labels_stay_with_their_images(mode):
    source, device = Painted(bad=BAD), torch.device("cuda", 0)
    bad_images = BadImages("painted", 10_000)
    reader = LabelledBatches(
        whole_set(source), Augment(FLIP, (8, 8)), device, 8, mode=mode, workers=2, bad_images=bad_images
    )
    for images, labels in reader.epoch(0):
        assert images.device == labels.device == device
        assert read_colours(images.cpu())[1] == labels.tolist()
    for in_memory in (True, False):
        views = labelled_views(Painted(in_memory=in_memory), np.arange(60), (8, 8), 9, device, 7, 2)
        numbers = torch.cat([pixels[:, 0, 0, 0] for _, pixels in views])
        assert numbers.tolist() == list(range(60))
