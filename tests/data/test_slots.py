"""The ring of batches: which slot is filled when, and that what was read of it is a copy."""

import itertools

import pytest
import torch

from stop_mim.data.crops import CroppedImages, CropRequests
from stop_mim.data.order import BatchOrder
from stop_mim.data.slots import BatchSlots, FilledSlots, SlotRequests

CPU = torch.device("cpu")


class Numbers(CroppedImages):
    """Fills a batch with the epoch of its request."""

    def __init__(self):
        pass

    def fill(self, crops, request):
        crops[:] = request.epoch
        return [f"bad in {request.epoch}"]


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_read_stays_when_the_slot_is_filled_again(shared):
    with BatchSlots(3, 4, (2, 5), CPU, shared) as slots:
        filler = FilledSlots(Numbers(), slots.pixels)
        read = []
        for asked in itertools.islice(SlotRequests(CropRequests(BatchOrder(4, 4), 0), slots), 7):
            slot, bad = filler[asked]
            assert bad == [f"bad in {len(read)}"]
            read.append(slots.read(slot))
        assert all(batch.shape == (4, 3, 2, 5) and batch.is_contiguous() for batch in read)
        assert [batch.unique().tolist() for batch in read] == [[number] for number in range(7)]


def test_a_slot_is_waited_for_before_it_is_given_out_again(monkeypatch):
    with BatchSlots(3, 4, (2, 2), CPU, False) as slots:
        waited = []
        monkeypatch.setattr(slots, "wait", waited.append)
        requests = iter(SlotRequests(CropRequests(BatchOrder(8, 4), 5), slots))
        for number in range(7):
            asked = next(requests)
            assert asked.slot == number % 3
            assert waited[-1] == asked.slot
            assert asked.request.indices == BatchOrder(8, 4).indices(5 + number).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_slots_are_copied_to_the_gpu():
    device = torch.device("cuda", 0)
    with BatchSlots(2, 64, (64, 64), device, True) as slots:
        filler = FilledSlots(Numbers(), slots.pixels)
        requests = itertools.islice(SlotRequests(CropRequests(BatchOrder(64, 64), 0), slots), 20)
        read = [slots.read(filler[asked][0]) for asked in requests]
    assert [batch.unique().tolist() for batch in read] == [[number] for number in range(20)]
