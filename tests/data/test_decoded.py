"""Decoded images in the cache: the same pixels, decoded once, by whichever process comes first, and never a wrong file."""

import errno
import json
import multiprocessing
import os
import pickle
import time

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms.v2.functional import resize

from stop_mim.data import decoded as decoded_module
from stop_mim.data.augment import Augment, AugmentConfig
from stop_mim.data.bad_images import BadImages
from stop_mim.data.decoded import DecodedSource, decode_in_pieces, decoded_images
from stop_mim.data.image_source import ImageSource
from stop_mim.data.images import BadImage
from stop_mim.data.labelled import labelled_views
from stop_mim.data.loader import open_loader, store_images
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

CPU = torch.device("cpu")
COUNT, SIZE = 120, (24, 20)


class Counted(ImageSource):
    """Random images that count how often they are read."""

    def __init__(self, bad=(), odd=(), seed=0):
        super().__init__("counted", {"class": np.arange(COUNT) % 4})
        self.images = torch.randint(
            256, (COUNT, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.bad, self.odd, self.seed, self.reads = set(bad), set(odd), seed, 0

    def __len__(self):
        return COUNT

    def read(self, index):
        self.reads += 1
        if index in self.bad:
            raise BadImage(self.describe(index), "broken")
        return resize(self.images[index], [10, 40]) if index in self.odd else self.images[index]

    def size(self, index):
        return (10, 40) if index in self.odd else SIZE

    def describe(self, index):
        return f"here#{index}"

    def fingerprint(self):
        return f"counted {self.seed}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, for sets as small as these, decoded in pieces of seven."""
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STOP_MIM_DECODED_GIB", raising=False)
    monkeypatch.setattr(decoded_module, "LEAST_CACHED_BYTES", 1)
    monkeypatch.setattr(decoded_module, "MOST_IMAGES_A_PIECE", 7)
    return tmp_path / "cache" / "decoded"


def store(source, bad_images=None, **options):
    bad_images = BadImages(source.name, COUNT) if bad_images is None else bad_images
    return store_images(source, (16, 16), bad_images, cached=True, **options)


def by_processes(monkeypatch):
    monkeypatch.setattr(decoded_module, "PIXELS_A_WORKER", 1)
    return 2


def by_threads(monkeypatch):
    monkeypatch.setattr(decoded_module, "PIXELS_A_THREAD", 1)
    monkeypatch.setattr(decoded_module, "usable_cores", lambda: 3)
    return 0


@pytest.mark.parametrize("how", [by_processes, by_threads, lambda monkeypatch: 0])
def test_pieces_hold_all_images_in_order_whoever_decodes_them(monkeypatch, how):
    workers = how(monkeypatch)
    pieces = list(decode_in_pieces(Counted(bad=(3, 119), odd=(50,)), SIZE, workers))
    assert [piece.first for piece in pieces] == list(range(0, COUNT, 7))
    found, expected = torch.cat([piece.pixels for piece in pieces]), Counted().images.clone()
    expected[[3, 119]] = 0
    expected[50] = resize(resize(expected[50], [10, 40]), list(SIZE))
    assert torch.equal(found, expected)
    assert {index: why for piece in pieces for index, why in piece.bad.items()} == {3: "broken", 119: "broken"}
    assert {index: size for piece in pieces for index, size in piece.sizes.items()} == {50: (10, 40)}


def test_a_second_run_decodes_nothing_and_says_so(cache):
    first, second = Counted(), Counted()
    assert torch.equal(store(first).pixels, first.images)
    again = store(second)
    assert torch.equal(again.pixels, first.images)
    assert first.reads >= COUNT
    assert second.reads == 0
    loaders = [
        open_loader(source, Augment(AugmentConfig(), (16, 16)), CPU, BadImages("set", COUNT), 0)
        for source in (Counted(), Counted(seed=1), Counted(seed=1))
    ]
    told = ["from the cache of decoded images" in loader.description for loader in loaders]
    assert told == [True, False, True]
    assert len(list(cache.glob("*.npy"))) == 2


def test_the_cache_follows_what_decides_the_pixels(cache):
    assert torch.equal(store(Counted(seed=0)).pixels, Counted(seed=0).images)
    assert torch.equal(store(Counted(seed=1)).pixels, Counted(seed=1).images)
    assert decoded_images(Counted(seed=1), (12, 10)).pixels.shape == (COUNT, 3, 12, 10)
    assert len(list(cache.glob("*.npy"))) == 3


def test_bad_images_are_left_out_and_named_by_every_run(tmp_path):
    kept = [index for index in range(COUNT) if index != 7]
    for number in range(2):
        file = tmp_path / f"bad-{number}.txt"
        stored = store(Counted(bad=(7,)), BadImages("set", COUNT, file))
        assert torch.equal(stored.pixels, Counted().images[kept])
        assert file.read_text() == "here#7: broken\n"
        assert stored.from_cache == (number == 1)
    for _ in range(2):
        with pytest.raises(InputError, match="2 of the 120 images"):
            store(Counted(bad=(7, 9), seed=2))


def test_an_image_of_another_size_keeps_its_size_in_the_cache(monkeypatch):
    monkeypatch.setattr("stop_mim.data.loader.SIZES_LOOKED_AT", 2)
    fresh, kept = store(Counted(bad=(2,), odd=(5, 7))), store(Counted(bad=(2,), odd=(5, 7)))
    assert kept.from_cache
    assert torch.equal(fresh.pixels, kept.pixels)
    expected = [[10, 40] if index in (5, 7) else list(SIZE) for index in range(COUNT) if index != 2]
    assert fresh.original_sizes.tolist() == kept.original_sizes.tolist() == expected


def test_an_image_that_was_bad_for_a_while_comes_back():
    assert len(store(Counted(bad=(7,))).pixels) == COUNT - 1
    assert torch.equal(store(Counted()).pixels, Counted().images)
    assert store(Counted()).from_cache


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def other_shape(file):
    np.save(file, np.zeros((COUNT, 3, 5, 5), np.uint8))


def pickled(file):
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def lose_the_record(file):
    file.with_suffix(".json").unlink()


def garble_the_record(file):
    file.with_suffix(".json").write_text('{"shape": 3}')


def no_json(file):
    file.with_suffix(".json").write_text("[")


@pytest.mark.parametrize(
    "damage", [cut_off, flip_a_bit, other_shape, pickled, lose_the_record, garble_the_record, no_json]
)
def test_a_damaged_file_is_made_anew(cache, damage):
    store(Counted())
    (file,) = cache.glob("*.npy")
    damage(file)
    source = Counted()
    assert torch.equal(store(source).pixels, source.images)
    assert source.reads >= COUNT
    assert store(Counted()).from_cache


class Slow(Counted):
    """Tells in a file that it was decoded, and takes its time."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def read(self, index):
        if index == 0:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.3)
        return super().read(index)


def _store_and_compare(log, barrier, results):
    barrier.wait()
    source = Slow(log)
    results.put(torch.equal(store(source).pixels, source.images))


def test_of_processes_that_begin_at_once_one_decodes(tmp_path, cache):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    log = tmp_path / "decoded.txt"
    processes = [context.Process(target=_store_and_compare, args=(log, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [True] * 3
    for process in processes:
        process.join()
    assert len(log.read_text().splitlines()) == 1
    assert sorted(file.suffix for file in cache.iterdir() if not file.name.startswith(".")) == [".json", ".npy"]


def full_disk(monkeypatch, cache):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100}))


def disk_that_fills_up(monkeypatch, cache):
    def write(path, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decoded_module, "write_atomically", write)


def no_folder(monkeypatch, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")


@pytest.mark.parametrize("obstacle", [full_disk, disk_that_fills_up, no_folder])
def test_without_a_place_for_the_cache_images_are_decoded_with_a_warning(monkeypatch, cache, obstacle):
    obstacle(monkeypatch, cache)
    source = Counted(bad=(7,))
    with pytest.warns(UserWarning, match=r"cannot be kept in .*decoded .*: set STOP_MIM_CACHE"):
        stored = store(source)
    assert torch.equal(stored.pixels, source.images[[index for index in range(COUNT) if index != 7]])
    assert not list(cache.parent.rglob("*.npy"))


def test_the_cache_can_be_limited_and_switched_off(monkeypatch, cache):
    needed = COUNT * 3 * SIZE[0] * SIZE[1]
    for limit, kept in ((0, False), ((needed - 1) / 2**30, False), (needed / 2**30, True)):
        monkeypatch.setenv("STOP_MIM_DECODED_GIB", str(limit))
        assert torch.equal(store(Counted()).pixels, Counted().images)
        assert bool(list(cache.glob("*.npy"))) == kept
    for wrong in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv("STOP_MIM_DECODED_GIB", wrong)
        with pytest.raises(InputError, match=f"STOP_MIM_DECODED_GIB is '{wrong}'"):
            store(Counted())


def test_sets_that_are_decoded_in_no_time_are_not_kept(monkeypatch, cache):
    monkeypatch.setattr(decoded_module, "LEAST_CACHED_BYTES", COUNT * 3 * SIZE[0] * SIZE[1] + 1)
    store(Counted())
    assert not cache.exists()


def test_a_source_from_the_cache_is_the_source_without_decoding():
    source = Counted()
    kept = DecodedSource(source, SIZE)
    assert (len(kept), kept.name, kept.fingerprint()) == (COUNT, "counted", source.fingerprint())
    assert kept.labels is source.labels
    assert source.reads == 0, "nothing is decoded before it is asked for"
    assert torch.equal(kept.stacked(), source.images)
    again = DecodedSource(Counted(), SIZE)
    for index in (0, COUNT - 1):
        assert torch.equal(again.read(index), source.images[index])
    assert again.source.reads == 0
    travelling = pickle.dumps(again)
    assert len(travelling) < len(pickle.dumps(source)) + 2000, "the pixels stay at home"
    assert torch.equal(pickle.loads(travelling).read(3), source.images[3])
    again.read(5).zero_()
    assert torch.equal(again.read(5), source.images[5])


def test_a_source_from_the_cache_has_its_bad_images_and_its_odd_ones():
    kept = DecodedSource(Counted(bad=(4,), odd=(6,)), SIZE)
    assert kept.stacked() is None
    with pytest.raises(BadImage, match="broken"):
        kept.read(4)
    assert kept.read(6).shape == (3, 10, 40)
    assert torch.equal(kept.read(5), Counted().images[5])
    with pytest.raises(IndexError):
        kept.read(COUNT)


@pytest.mark.parametrize("bad", [(), (4,)])
@pytest.mark.parametrize("workers", [0, 2])
def test_views_of_a_source_from_the_cache_are_those_of_the_source(bad, workers):
    indices = np.arange(COUNT)[::-1].copy()
    sources = Counted(bad), DecodedSource(Counted(bad), SIZE)
    views = [list(labelled_views(source, indices, (16, 16), 20, CPU, 32, workers)) for source in sources]
    positions = [torch.cat([one for one, _ in view]) for view in views]
    pixels = [torch.cat([one for _, one in view]) for view in views]
    assert torch.equal(*positions)
    assert len(positions[0]) == COUNT - len(bad)
    assert torch.equal(*pixels)


def test_a_parquet_or_folder_is_cached_as_any_other(tmp_path, cache):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(12):
        PIL.Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number:02d}.png")
    fresh = store_images(open_source(str(folder)), (8, 8), BadImages("set", 12), cached=True)
    kept = store_images(open_source(str(folder)), (8, 8), BadImages("set", 12), cached=True)
    assert kept.from_cache
    assert torch.equal(fresh.pixels, kept.pixels)
    assert kept.pixels[:, 0, 0, 0].tolist() == list(range(12))
    (record,) = cache.glob("*.json")
    assert json.loads(record.read_text())["shape"] == [12, 3, 8, 8]
    PIL.Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(folder / "03.png")
    changed = store_images(open_source(str(folder)), (8, 8), BadImages("set", 12), cached=True)
    assert changed.pixels[3, 0, 0, 0] == 99
