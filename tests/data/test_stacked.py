"""Images in memory on their way to a device: in order, ahead of their use, and never mixed up."""

import threading

import numpy as np
import pytest
import torch

from stop_mim.data.stacked import SLOTS, made_ahead, stacked_batches
from stop_mim.errors import InputError

DEVICES = [
    "cpu",
    pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_every_batch_holds_the_images_that_it_names(device):
    generator = torch.Generator().manual_seed(0)
    stacked = torch.randint(0, 256, (50, 3, 16, 16), dtype=torch.uint8, generator=generator)
    batches = [torch.randperm(50, generator=generator)[:size] for size in (8, 8, 1, 8, 3)] * (2 * SLOTS)
    # Kept until the end: a batch must not change when the memory that it came through is filled again.
    found = list(stacked_batches(stacked, batches, torch.device(device)))
    assert len(found) == len(batches)
    for numbers, pixels in zip(batches, found, strict=True):
        assert str(pixels.device) == device
        assert torch.equal(pixels.cpu(), stacked[numbers])


@pytest.mark.parametrize("device", DEVICES)
def test_images_of_a_file_may_be_read_only(device, tmp_path):
    np.save(tmp_path / "pixels.npy", np.arange(60, dtype=np.uint8).reshape(5, 3, 2, 2))
    stacked = torch.from_numpy(np.load(tmp_path / "pixels.npy", mmap_mode="c"))
    (pixels,) = stacked_batches(stacked, [torch.tensor([4, 0])], torch.device(device))
    assert pixels[:, 0, 0, 0].tolist() == [48, 0]
    assert list(stacked_batches(stacked, [], torch.device(device))) == []


def test_items_are_made_ahead_in_order_by_one_thread():
    made, threads = [], set()

    def numbers():
        for number in range(5):
            made.append(number)
            threads.add(threading.get_ident())
            yield number

    ahead = made_ahead(numbers(), ahead=2)
    assert next(ahead) == 0
    assert [0, *ahead] == list(range(5)) == made
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_goes_wrong_ahead_is_told_and_the_rest_is_not_made():
    made = []

    def failing():
        for number in range(100):
            if number == 3:
                raise InputError("three")
            made.append(number)
            yield number

    with pytest.raises(InputError, match="three"):
        list(made_ahead(failing()))
    many = made_ahead(iter(range(1000, 2000)), ahead=2)
    next(many)
    many.close()
    assert made == [0, 1, 2]
    assert "ThreadPoolExecutor" not in "".join(thread.name for thread in threading.enumerate())
