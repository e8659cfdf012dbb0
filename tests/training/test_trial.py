"""How many images fit into memory at once, from two measurements."""

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.training.trial import images_at_once

MIB = 2**20


def memory_of(fixed, an_image, limit=float("inf")):
    """A step's memory, and a device that has no more than the limit."""

    def measure(images):
        needed = fixed + an_image * images
        if needed > limit:
            raise torch.OutOfMemoryError
        return needed

    return measure


@pytest.mark.parametrize(
    ("per_step", "budget", "expected"),
    # All fit; the largest divisor that fits; none but one; few images are not divided at all.
    [(2048, 3000, 2048), (2048, 200, 64), (2048, 164, 64), (2048, 163, 32), (100, 180, 50), (2048, 50, 1), (16, 0, 16)],
)
def test_the_largest_part_that_fits(per_step, budget, expected):
    assert images_at_once(per_step, memory_of(100 * MIB, MIB), budget * MIB) == expected


def test_a_device_that_holds_hardly_any_image_is_an_error_only_if_it_holds_none():
    assert images_at_once(64, memory_of(100 * MIB, 10 * MIB, limit=200 * MIB), 150 * MIB) == 4
    with pytest.raises(InputError, match="4 images does not fit"):
        images_at_once(64, memory_of(100 * MIB, 10 * MIB, limit=120 * MIB), 60 * MIB)
