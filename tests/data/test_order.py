"""The order of images: every one at most once an epoch, and any batch can be the first."""

import itertools

import numpy as np
import pytest
import torch

from stop_mim.data.order import SequentialOrder, ShuffledOrder
from stop_mim.errors import InputError


def epoch_indices(order, epoch):
    first = epoch * order.batches_per_epoch
    return [index for batch in range(first, first + order.batches_per_epoch) for index in order.indices(batch).tolist()]


def test_an_epoch_sees_every_image_at_most_once_and_leaves_out_less_than_a_step():
    order = ShuffledOrder(103, 8, batches_per_step=3)
    left_out = []
    for epoch in range(4):
        seen = epoch_indices(order, epoch)
        assert len(set(seen)) == len(seen) > 103 - 8 * 3
        left_out.append(set(range(103)) - set(seen))
    assert len(set.union(*left_out)) > len(left_out[0])
    assert sorted(epoch_indices(ShuffledOrder(96, 8), 1)) == list(range(96))


def test_epochs_and_seeds_differ():
    order, other = ShuffledOrder(64, 8, seed=0), ShuffledOrder(64, 8, seed=1)
    orders = [epoch_indices(order, 0), epoch_indices(order, 1), epoch_indices(other, 0), list(range(64))]
    assert len({tuple(indices) for indices in orders}) == 4


def test_a_step_of_several_processes_has_the_images_of_a_step_of_one():
    alone = ShuffledOrder(96, 12)
    together = [ShuffledOrder(96, 4, rank=rank, world_size=3) for rank in range(3)]
    accumulated = ShuffledOrder(96, 4, batches_per_step=3)
    for step in range(2 * alone.batches_per_epoch):
        expected = alone.indices(step).tolist()
        assert [index for order in together for index in order.indices(step).tolist()] == expected
        assert [i for batch in range(3 * step, 3 * step + 3) for i in accumulated.indices(batch).tolist()] == expected


def test_any_batch_can_be_the_first():
    batches = [ShuffledOrder(50, 8, 5, rank=1, world_size=2).indices(batch) for batch in range(20)]
    order = ShuffledOrder(50, 8, 5, rank=1, world_size=2)
    assert all(torch.equal(order.indices(batch), batches[batch]) for batch in (19, 0, 7, 13, 2))


def test_an_epoch_is_a_whole_number_of_steps():
    order = ShuffledOrder(100, 8, world_size=2, batches_per_step=2)
    assert order.batches_per_epoch == 6
    assert [order.epoch_of(batch) for batch in (0, 5, 6, 11, 12)] == [0, 0, 1, 1, 2]
    assert ShuffledOrder(32, 8, world_size=2, batches_per_step=2).batches_per_epoch == 2
    with pytest.raises(InputError, match=r"optim\.batch_size is 32 and there are only 31 images"):
        ShuffledOrder(31, 8, world_size=2, batches_per_step=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_dropping_the_rest_every_image_is_visited_once_in_equally_many_batches(world_size):
    for n_images, batch_size in itertools.product(range(world_size, 40), (1, 2, 3, 8)):
        orders = [
            ShuffledOrder(np.arange(n_images) + 100, batch_size, 0, rank, world_size, drop_last=False)
            for rank in range(world_size)
        ]
        assert len({order.batches_per_epoch for order in orders}) == 1
        assert sorted(index for order in orders for index in epoch_indices(order, 5)) == list(
            range(100, 100 + n_images)
        )
        lengths = [len(order.indices(batch)) for order in orders for batch in range(order.batches_per_epoch)]
        # None is empty, and none has a single image where another choice was left: it has no statistics.
        assert min(lengths) >= (min(2, batch_size) if n_images >= 2 * world_size else 1)
        assert max(lengths) <= min(batch_size + 2, max(order.batch_size for order in orders))


def test_a_sequential_order_has_every_image_once_in_its_place():
    orders = [SequentialOrder(np.array([5, 3, 9, 1, 7]), 2, rank, 2) for rank in (0, 1)]
    assert [[order.indices(batch).tolist() for batch in range(order.length)] for order in orders] == [
        [[5, 9], [7]],
        [[3, 1]],
    ]


def test_fewer_images_than_processes_are_refused():
    with pytest.raises(InputError, match="2 images for 3 processes"):
        ShuffledOrder(2, 4, world_size=3, drop_last=False)
