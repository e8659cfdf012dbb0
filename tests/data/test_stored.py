"""Decoded images: the same pixels, decoded once, from memory or from the cache."""

import numpy as np
import pytest
import torch
from painted_images import Painted

from stop_mim.data import stored as stored_module
from stop_mim.data.augment import AugmentConfig, RandomCrop, TestView
from stop_mim.data.batches import Batches, Placement
from stop_mim.data.image_source import BadImages
from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.data.stored import store_images
from stop_mim.errors import InputError

CPU = torch.device("cpu")
COUNT, SIZE = 120, (24, 20)
EVERY = np.arange(COUNT)


def painted(bad=(), seed=1):
    return Painted(COUNT, bad, (SIZE,), seed=seed)


def pixels(seed=1):
    return torch.stack([painted(seed=seed).read(index) for index in range(COUNT)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, for sets as small as these, decoded seven images at a time."""
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STOP_MIM_DECODED_GIB", raising=False)
    monkeypatch.setattr(stored_module, "LEAST_CACHED_BYTES", 1)
    monkeypatch.setattr(stored_module, "_IMAGES_A_PIECE", 7)
    return tmp_path / "cache" / "decoded"


def store(source, images=EVERY, **options):
    return store_images(source, images, SIZE, **options)


def test_some_images_are_copied_to_a_device_piece_by_piece():
    rows = np.flatnonzero(EVERY % 5)
    assert torch.equal(stored_module._some_on(CPU, pixels(), rows), pixels()[torch.from_numpy(rows)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", ["0", "1"])
def test_all_images_are_stored_in_order_whoever_decodes_them(monkeypatch, workers, limit):
    monkeypatch.setenv("STOP_MIM_DECODED_GIB", limit)
    monkeypatch.setattr(stored_module, "_PIXELS_A_WORKER", 1)
    progress = []
    stored = store(painted(bad=(3, 119)), workers=workers, progress=lambda *numbers: progress.append(numbers))
    expected = pixels()
    expected[[3, 119]] = 0
    assert torch.equal(stored.pixels, expected)
    assert stored.bad == {3: "image 3: torn", 119: "image 119: torn"}
    assert progress == [(done, COUNT) for done in (*range(7, COUNT, 7), COUNT)]


def test_a_second_run_decodes_nothing_unless_other_pixels_are_asked_for(cache):
    for seed, fresh in ((1, True), (1, False), (2, True), (2, False)):
        source = painted(seed=seed)
        stored = store(source)
        assert torch.equal(stored.pixels, pixels(seed))
        assert stored.from_cache == (not source.reads) == (not fresh)
    for view in (TestView((12, 10)), TestView((12, 10), 14)):
        for from_cache in (False, True):
            seen = store_images(painted(), EVERY, view.size, view=view)
            assert torch.equal(seen.pixels, view.cut(pixels()))
            assert seen.from_cache == from_cache
    assert len(list(cache.iterdir())) == 4
    # Most of the images come from the cache too, few are decoded.
    assert store(painted(), EVERY[10:]).from_cache
    few = store(painted(), EVERY[[4, 90]])
    assert torch.equal(few.pixels, pixels()[[4, 90]])
    assert few.rows[[4, 90]].tolist() == [0, 1]


def test_what_was_bad_is_known_from_the_cache_and_may_be_good_again():
    for from_cache in (False, True):
        stored = store(painted(bad=(2,)))
        assert (stored.from_cache, stored.bad) == (from_cache, {2: "image 2: torn"})
    again = store(painted())
    assert (again.from_cache, again.bad) == (True, {})
    assert torch.equal(again.pixels[2], pixels()[2])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("pixels.npy", lambda old: old[:-100]),
        *(("bad.json", lambda old, new=new: new) for new in (b"{", b'["a"]', b"[9999]")),
    ],
)
def test_a_damaged_file_is_named(cache, name, damage):
    store(painted())
    (file,) = cache.glob(f"*/{name}")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=f"{file.parent} cannot be read .*delete it"):
        store(painted())


@pytest.mark.parametrize("obstacle", ["full disk", "no folder"])
def test_without_a_place_for_the_cache_images_are_decoded_with_a_warning(monkeypatch, cache, obstacle):
    if obstacle == "full disk":
        monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    else:
        cache.parent.mkdir(parents=True)
        cache.write_text("a file where the folder would be")
    source = painted()
    with pytest.warns(UserWarning, match="set STOP_MIM_CACHE"):
        assert torch.equal(store(source).pixels, pixels())
    assert not list(cache.parent.rglob("*/*"))


def test_the_cache_can_be_limited_and_switched_off(monkeypatch, cache):
    needed = COUNT * 3 * SIZE[0] * SIZE[1]
    for limit, kept in ((0, False), ((needed - 1) / 2**30, False), (needed / 2**30, True)):
        monkeypatch.setenv("STOP_MIM_DECODED_GIB", str(limit))
        assert torch.equal(store(painted()).pixels, pixels())
        assert bool(list(cache.glob("*"))) == kept
    monkeypatch.delenv("STOP_MIM_DECODED_GIB")
    monkeypatch.setattr(stored_module, "LEAST_CACHED_BYTES", needed + 1)
    assert not store(painted(seed=2)).from_cache
    assert not store(painted(seed=2)).from_cache


@pytest.mark.parametrize("bad", [(), (4,)])
def test_training_and_scoring_read_the_same_cache(bad):
    for number, from_cache in enumerate((False, True, True)):
        source, bad_images = painted(bad=bad), BadImages("counted", 1000)
        training = ShuffledOrder(COUNT, 8), RandomCrop(AugmentConfig(), (16, 16))
        scoring = SequentialOrder(EVERY[::-1].copy(), 32), TestView((16, 16), 20)
        order, view = scoring if number == 2 else training
        batches = Batches(source, order, view, Placement(workers=0), CPU, bad_images=bad_images)
        assert ("from the cache" in batches.description) == from_cache
        assert len(bad_images) == len(bad)
    source.reads.clear()
    cached = list(batches.starting_at())
    streamed = Batches(source, order, view, Placement("streaming", workers=0), CPU, bad_images=bad_images)
    assert not source.reads
    for one, other in zip(cached, streamed.starting_at(), strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.images, other.images)
