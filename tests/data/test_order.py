"""The order of images: every one at most once an epoch, and any batch can be the first."""

import pytest
import torch

from stop_mim.data.order import BatchOrder
from stop_mim.errors import InputError


def epoch_indices(order: BatchOrder, epoch: int) -> list[int]:
    first = epoch * order.batches_per_epoch
    return [index for batch in range(first, first + order.batches_per_epoch) for index in order.indices(batch).tolist()]


def test_an_epoch_sees_every_image_at_most_once_and_leaves_out_less_than_a_step():
    order = BatchOrder(n_images=103, batch_size=8, batches_per_step=3)
    for epoch in range(3):
        seen = epoch_indices(order, epoch)
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(103))
        assert 103 - len(seen) < 8 * 3


def test_an_epoch_that_divides_evenly_sees_every_image_exactly_once():
    assert sorted(epoch_indices(BatchOrder(n_images=96, batch_size=8), 1)) == list(range(96))


def test_what_an_epoch_leaves_out_changes():
    order = BatchOrder(n_images=103, batch_size=20)
    left_out = [set(range(103)) - set(epoch_indices(order, epoch)) for epoch in range(4)]
    assert all(len(images) == 3 for images in left_out)
    assert len(set.union(*left_out)) > 3


def test_epochs_and_seeds_differ():
    order, other = BatchOrder(64, 8, seed=0), BatchOrder(64, 8, seed=1)
    orders = [epoch_indices(order, 0), epoch_indices(order, 1), epoch_indices(other, 0), list(range(64))]
    assert len({tuple(indices) for indices in orders}) == 4


def test_ranks_have_disjoint_parts_that_make_the_whole():
    ranks = [BatchOrder(96, 4, rank=rank, world_size=3, batches_per_step=2) for rank in range(3)]
    parts = [set(epoch_indices(order, 2)) for order in ranks]
    assert [len(part) for part in parts] == [32, 32, 32]
    assert set.union(*parts) == set(range(96))


def test_a_step_of_several_processes_has_the_images_of_a_step_of_one():
    alone = BatchOrder(96, 12)
    together = [BatchOrder(96, 4, rank=rank, world_size=3) for rank in range(3)]
    accumulated = BatchOrder(96, 4, batches_per_step=3)
    for step in range(2 * alone.steps_per_epoch):
        expected = alone.indices(step).tolist()
        assert [index for order in together for index in order.indices(step).tolist()] == expected
        assert [i for batch in range(3 * step, 3 * step + 3) for i in accumulated.indices(batch).tolist()] == expected


def test_any_batch_can_be_the_first():
    forwards = BatchOrder(50, 8, rank=1, world_size=2, seed=5)
    batches = [forwards.indices(batch) for batch in range(20)]
    for batch in (19, 0, 7, 13, 2):
        fresh = BatchOrder(50, 8, rank=1, world_size=2, seed=5)
        assert torch.equal(fresh.indices(batch), batches[batch])
        assert torch.equal(forwards.indices(batch), batches[batch])


def test_the_order_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    first = BatchOrder(50, 8).indices(0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(BatchOrder(50, 8).indices(0), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_is_a_whole_number_of_steps():
    order = BatchOrder(n_images=100, batch_size=8, world_size=2, batches_per_step=2)
    assert (order.steps_per_epoch, order.batches_per_epoch) == (3, 6)
    assert [order.epoch_of(batch) for batch in (0, 5, 6, 11, 12)] == [0, 0, 1, 1, 2]


def test_a_data_set_smaller_than_a_step_is_refused():
    assert BatchOrder(32, 8, world_size=2, batches_per_step=2).steps_per_epoch == 1
    with pytest.raises(InputError, match=r"optim\.batch_size is 32 and there are only 31 images"):
        BatchOrder(31, 8, world_size=2, batches_per_step=2)
