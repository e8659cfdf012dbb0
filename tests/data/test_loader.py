"""Both loaders: what a batch holds, that any batch can be the first, and what becomes of bad images."""

import itertools

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision.transforms.v2.functional import resize

from stop_mim.data import decoded as decoded_module
from stop_mim.data import loader as loader_module
from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, Augment, AugmentConfig
from stop_mim.data.bad_images import BadImages
from stop_mim.data.loader import (
    ResidentLoader,
    StreamingLoader,
    choose_mode,
    common_size,
    open_loader,
    read_or_next,
    resident_budget,
    store_images,
)
from stop_mim.data.order import BatchOrder
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError

CPU = torch.device("cpu")
WHOLE = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
RICH = AugmentConfig(flip_probability=0.5, jitter_probability=0.5, grey_probability=0.2, blur_probability=0.5)


def gradient_image(number, height=24, width=24):
    """Red grows to the right, green downwards, and blue tells the number."""
    red = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    green = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    blue = np.full((height, width), number)
    return PIL.Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8))


def write_images(folder, count, sizes=((24, 24),), bad=()):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"{number:04d}.{'png' if number % 2 else 'jpg'}"
        gradient_image(number, *sizes[number % len(sizes)]).save(path, quality=95)
        if number in bad:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return open_source(str(folder))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "set", 40)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "mixed", 40, sizes=((24, 24), (20, 40), (48, 30)))


def make(source, mode, config=RICH, size=(16, 16), workers=0, bad_images=None, **options):
    bad_images = BadImages(source.name, len(source)) if bad_images is None else bad_images
    return open_loader(source, Augment(config, size), CPU, bad_images, 0, mode=mode, workers=workers, **options)


def take(loader, count, batch_size=8, first=0, **options):
    order = BatchOrder(loader.n_images, batch_size, **options)
    return list(itertools.islice(loader.batches(order, first), count))


def numbers(batch):
    """The images of a batch that was neither cropped nor recoloured, by their blue."""
    return (batch[:, 2].mean(dim=(1, 2)) * IMAGENET_STD[2] + IMAGENET_MEAN[2]).mul(255).round().int().tolist()


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_batches_hold_the_images_of_the_order_normalised(tmp_path, mode):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(16):
        gradient_image(number).save(folder / f"{number:02d}.png")
    source = open_source(str(folder))
    loader = make(source, mode, WHOLE, size=(24, 24))
    order = BatchOrder(16, 4)
    for number, batch in enumerate(itertools.islice(loader.batches(order, 0), 6)):
        assert batch.shape == (4, 3, 24, 24)
        assert batch.dtype == torch.float32
        pixels = torch.stack([source.read(index) for index in order.indices(number).tolist()]).float() / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
        torch.testing.assert_close(batch, (pixels - mean) / std, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_an_epoch_of_batches_holds_every_image(source, mode):
    seen = [n for batch in take(make(source, mode, WHOLE), 5) for n in numbers(batch)]
    # JPEG moves the blue by a little.
    assert np.abs(np.sort(seen) - np.arange(40)).max() <= 2
    assert len(set(seen)) > 30


@pytest.mark.parametrize("mode", ["resident", "streaming"])
@pytest.mark.parametrize("kind", ["source", "mixed"])
def test_any_batch_can_be_the_first(request, mode, kind):
    loader = make(request.getfixturevalue(kind), mode)
    batches = take(loader, 12)
    for first in (1, 4, 5, 11):
        assert torch.equal(take(loader, 1, first=first)[0], batches[first])
    # Epochs differ in order and in crops: no two batches are alike.
    assert len({batch.sum().item() for batch in batches}) == 12


def test_workers_change_nothing(mixed):
    alone = take(make(mixed, "streaming"), 7, first=3)
    for one, other in zip(alone, take(make(mixed, "streaming", workers=2), 7, first=3), strict=True):
        assert torch.equal(one, other)


def test_batches_stay_as_they_are_when_their_memory_is_filled_again(mixed):
    alone = take(make(mixed, "streaming"), 20)
    for one, other in zip(alone, take(make(mixed, "streaming", workers=1), 20), strict=True):
        assert torch.equal(one, other)


def test_what_is_done_to_an_image_does_not_depend_on_the_global_generator(mixed):
    torch.manual_seed(0)
    first = take(make(mixed, "streaming"), 1)[0]
    torch.manual_seed(1)
    assert torch.equal(take(make(mixed, "streaming"), 1)[0], first)


def test_an_image_is_cropped_anew_in_every_epoch_with_an_equal_seed_in_every_process(source):
    crops = AugmentConfig(crop_scale=(0.3, 0.5))
    loader = make(source, "streaming", crops)
    alone, two = BatchOrder(40, 8), [BatchOrder(40, 4, rank=rank, world_size=2) for rank in (0, 1)]
    parts = [next(iter(loader.batches(order, 2))) for order in two]
    assert torch.equal(torch.cat(parts), next(iter(loader.batches(alone, 2))))
    epochs = [take(loader, 1, first=5 * epoch, batch_size=8)[0] for epoch in (0, 1)]
    order = BatchOrder(40, 8)
    shared = set(order.indices(0).tolist()) & set(order.indices(5).tolist())
    assert shared
    for index in shared:
        places = [order.indices(5 * epoch).tolist().index(index) for epoch in (0, 1)]
        assert not torch.equal(epochs[0][places[0]], epochs[1][places[1]])


def test_ranks_augment_differently_where_images_are_resident():
    pixels = torch.randint(0, 256, (1, 3, 24, 24), dtype=torch.uint8).expand(8, -1, -1, -1)
    stored = loader_module.StoredImages(pixels, None)
    ranks = [ResidentLoader(stored, Augment(RICH, (16, 16)), CPU, 0, rank) for rank in (0, 1)]
    batches = [next(iter(loader.batches(BatchOrder(8, 8), 0))) for loader in ranks]
    assert not torch.allclose(*batches)


def test_both_loaders_see_the_same_distribution_of_crops(source):
    crops = AugmentConfig(crop_scale=(0.2, 0.6))
    statistics = {}
    for mode in ("resident", "streaming"):
        images = torch.cat(take(make(source, mode, crops), 400))[:, :2]
        centres, extents = images.mean(dim=(2, 3)), images.amax(dim=(2, 3)) - images.amin(dim=(2, 3))
        values = torch.cat([centres, extents], dim=1)
        statistics[mode] = torch.cat([values.mean(0), values.std(0), values.quantile(0.1, 0), values.quantile(0.9, 0)])
    # 3200 crops each; the deviations are 0.5 for centres and 0.4 for extents, so that means differ by some 0.015.
    torch.testing.assert_close(statistics["resident"], statistics["streaming"], atol=0.12, rtol=0)


def test_images_of_one_size_become_resident_and_others_are_streamed(source, mixed):
    assert common_size(source) == (24, 24)
    assert common_size(mixed) is None
    assert isinstance(make(source, "auto"), ResidentLoader)
    assert isinstance(make(mixed, "auto"), StreamingLoader)
    assert "resident: 40 images of 24x24" in make(source, "auto").description
    assert "streaming: 40 images, decoded by 3 workers" in make(mixed, "auto", workers=3).description


def test_images_that_do_not_fit_into_the_budget_are_streamed(source, monkeypatch):
    needed = 40 * 3 * 24 * 24
    for budget, mode in ((needed, "resident"), (needed - 1, "streaming")):
        monkeypatch.setattr(loader_module, "resident_budget", lambda device, processes, budget=budget: budget)
        assert choose_mode(source, CPU) == mode


def test_the_budget_is_a_part_of_the_memory_shared_by_the_processes(monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert resident_budget(CPU) == 1000 * 4096 // 4
    assert resident_budget(CPU, processes_on_host=4) == 1000 * 4096 // 16


def test_images_of_different_sizes_can_be_made_resident_and_keep_their_sizes(mixed):
    loader = make(mixed, "resident", size=(14, 21))
    assert loader.pixels.shape == (40, 3, 16, 24)
    expected = [(24, 24), (20, 40), (48, 30)] * 14
    assert [tuple(size) for size in loader.original_sizes.tolist()] == expected[:40]
    for index in (0, 1, 2, 39):
        assert torch.equal(loader.pixels[index], resize(mixed.read(index), [16, 24], antialias=True))


def test_crops_of_resident_images_are_drawn_in_their_own_sizes(tmp_path):
    # A crop of ratio 1 of an image twice as wide as high is at most half of it; in the squashed copy it would be all.
    source = write_images(tmp_path / "wide", 16, sizes=((20, 40), (40, 20)))
    square = AugmentConfig(crop_scale=(0.4, 0.5), crop_ratio=(1.0, 1.0))
    (batch,) = take(make(source, "resident", square), 1, batch_size=16)
    widths, heights = ((batch[:, c].amax((1, 2)) - batch[:, c].amin((1, 2))) * IMAGENET_STD[c] for c in (0, 1))
    indices = BatchOrder(16, 16).indices(0)
    wide = indices % 2 == 0
    assert (widths[wide] / heights[wide]).mean() == pytest.approx(0.5, abs=0.08)
    assert (widths[~wide] / heights[~wide]).mean() == pytest.approx(2.0, abs=0.3)


def test_streaming_puts_the_next_good_image_in_the_place_of_a_bad_one(tmp_path):
    source = write_images(tmp_path / "set", 100, bad=(7,))
    for workers in (0, 2):
        file = tmp_path / f"bad{workers}.txt"
        bad_images = BadImages(source.name, 100, file)
        loader = make(source, "streaming", WHOLE, workers=workers, bad_images=bad_images)
        order = BatchOrder(100, 10)
        batches = list(itertools.islice(loader.batches(order, 0), 20))
        assert all(torch.isfinite(batch).all() for batch in batches)
        for epoch in (0, 1):
            images = torch.cat(batches[10 * epoch : 10 * epoch + 10])
            indices = torch.cat([order.indices(batch) for batch in range(10 * epoch, 10 * epoch + 10)]).tolist()
            assert torch.equal(images[indices.index(7)], images[indices.index(8)])
        assert len(bad_images) == 1
        (line,) = file.read_text().splitlines()
        assert line.startswith(f"{source.describe(7)}: ")


def test_the_next_good_image_may_be_several_further_and_at_the_beginning(tmp_path):
    source = write_images(tmp_path / "set", 6, bad=(4, 5))
    pixels, bad = read_or_next(source, 4)
    assert torch.equal(pixels, source.read(0))
    assert [line.split(":")[0] for line in bad] == [source.describe(4), source.describe(5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_too_many_bad_images_is_refused(tmp_path, workers):
    source = write_images(tmp_path / "set", 100, bad=(7, 60))
    loader = make(source, "streaming", workers=workers)
    with pytest.raises(InputError, match="2 of the 100 images"):
        take(loader, 10, batch_size=10)


def test_resident_leaves_bad_images_out(tmp_path):
    source = write_images(tmp_path / "set", 100, bad=(7,))
    bad_images = BadImages(source.name, 100, tmp_path / "bad.txt")
    loader = make(source, "resident", WHOLE, bad_images=bad_images)
    assert loader.n_images == 99
    kept = [index for index in range(100) if index != 7]
    assert torch.equal(loader.pixels, torch.stack([source.read(index) for index in kept]))
    assert (tmp_path / "bad.txt").read_text().startswith(source.describe(7))
    assert len(bad_images) == 1


def test_resident_with_too_many_bad_images_is_refused(tmp_path):
    with pytest.raises(InputError, match="2 of the 100 images"):
        make(write_images(tmp_path / "set", 100, bad=(7, 60)), "resident")


def test_a_set_without_a_good_image_is_refused(tmp_path):
    source = write_images(tmp_path / "set", 3, bad=(0, 1, 2))
    with pytest.raises(InputError, match="None of the 3 images"):
        read_or_next(source, 1)
    with pytest.raises(InputError, match="of the 3 images"):
        make(source, "resident")


def test_a_size_that_was_not_looked_at_is_squashed_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "SIZES_LOOKED_AT", 2)
    source = write_images(tmp_path / "set", 10, sizes=((24, 24),) * 9 + ((20, 40),))
    stored = store_images(source, (16, 16), BadImages(source.name, 10))
    assert stored.pixels.shape == (10, 3, 24, 24)
    assert stored.original_sizes.tolist() == [[24, 24]] * 9 + [[20, 40]]


def test_progress_of_decoding_is_told(source, monkeypatch):
    monkeypatch.setattr(decoded_module, "MOST_IMAGES_A_PIECE", 16)
    told = []
    make(source, "resident", progress=lambda done, total: told.append((done, total)))
    assert told == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_batches_are_on_the_gpu_and_any_can_be_the_first(source, mode):
    loader = open_loader(
        source, Augment(RICH, (16, 16)), torch.device("cuda", 0), BadImages("set", 40), 0, mode=mode, workers=2
    )
    batches = take(loader, 6)
    assert batches[0].device.type == "cuda"
    assert torch.equal(take(loader, 1, first=4)[0], batches[4])
    assert resident_budget(torch.device("cuda", 0)) > 0
