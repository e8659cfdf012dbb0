"""Schedules are pure functions of the step, with the ends, the warm-up and the hold that were asked for."""

import itertools
import math
from dataclasses import replace

import pytest

from stop_mim.training.config import OptimConfig
from stop_mim.training.description import warnings_about
from stop_mim.training.schedules import cosine, initial_part, linear, values_at

STEPS_PER_EPOCH = 10
OPTIM = OptimConfig(
    epochs=20,
    lr=1e-3,
    start_lr=1e-4,
    final_lr=1e-5,
    warmup_epochs=4.0,
    weight_decay=0.04,
    final_weight_decay=0.4,
    ema_start=0.9,
    ema_final=1.0,
)
LAST = 20 * STEPS_PER_EPOCH - 1


def curve(name, optim=OPTIM):
    return [getattr(values_at(step, STEPS_PER_EPOCH, optim), name) for step in range(LAST + 1)]


def test_the_learning_rate_rises_on_a_line_to_its_peak_and_then_falls_along_a_cosine():
    rates = curve("lr")
    assert (rates[0], rates[-1]) == pytest.approx((1e-4, 1e-5))
    assert rates[40] == max(rates) == pytest.approx(1e-3)
    assert rates[20] == pytest.approx((1e-4 + 1e-3) / 2)
    assert all(later > earlier for earlier, later in itertools.pairwise(rates[:41]))
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[40:]))
    middle = 40 + (LAST - 40) / 3
    assert rates[round(middle)] == pytest.approx(1e-5 + (1e-3 - 1e-5) * 0.75, rel=1e-6)


def test_weight_decay_follows_a_cosine_and_momentum_a_line():
    decays, momenta = curve("weight_decay"), curve("ema_momentum")
    assert (decays[0], decays[-1], momenta[0], momenta[-1]) == pytest.approx((0.04, 0.4, 0.9, 1.0))
    assert all(later > earlier for earlier, later in itertools.pairwise(decays))
    assert decays[50] == pytest.approx(0.4 + (0.04 - 0.4) * 0.5 * (1 + math.cos(math.pi * 50 / LAST)))
    steps = [later - earlier for earlier, later in itertools.pairwise(momenta)]
    assert min(steps) == pytest.approx(max(steps)) == pytest.approx(0.1 / LAST)


def test_rate_and_decay_are_held_and_momentum_moves_on():
    held = OptimConfig(**{**vars(OPTIM), "hold_after_epoch": 12.0})
    for name in ("lr", "weight_decay"):
        plain, with_hold = curve(name), curve(name, held)
        assert with_hold[:121] == plain[:121]
        assert set(with_hold[120:]) == {plain[120]}
    assert curve("ema_momentum", held) == curve("ema_momentum")


@pytest.mark.parametrize(
    ("steps", "start"), [(291, 0.965636), (2000, 0.995), (2500, 0.996), (375_000, 0.996), (5, 0.0)]
)
def test_the_momentum_of_a_short_run_starts_lower(steps, start):
    optim = OptimConfig(epochs=1, warmup_epochs=0.0)
    assert values_at(0, steps, optim).ema_momentum == pytest.approx(start, abs=1e-6)
    assert values_at(steps - 1, steps, optim).ema_momentum == 1
    # exp(-5), as of a line from 1 - 10 / steps to 1; at any length below the 1% that is warned of.
    assert initial_part(optim, steps) <= 0.0068


def test_the_initial_part_of_the_target_is_the_product_of_all_momenta():
    """Three epochs of Tiny ImageNet-100 in batches of 512, 291 steps: 56% with a fixed 0.996."""
    optim = OptimConfig(epochs=3, batch_size=512, warmup_epochs=0.0, ema_start=0.996)
    momenta = [values_at(step, 97, optim).ema_momentum for step in range(291)]
    assert initial_part(optim, 291) == pytest.approx(math.prod(momenta)) == pytest.approx(0.56, abs=0.005)
    *_, warning = warnings_about(optim, 50_000)
    for named in ("56% of the target encoder", "ema_start is 0.996", "to 0.966."):
        assert named in warning
    assert not any("target encoder" in one for one in warnings_about(replace(optim, ema_start=None), 50_000))


@pytest.mark.parametrize("shape", [linear, cosine])
def test_shapes_stay_between_their_ends(shape):
    assert [shape(progress, 2.0, 1.0) for progress in (-1, 0)] == pytest.approx([2.0, 2.0])
    assert [shape(progress, 2.0, 1.0) for progress in (1, 7)] == pytest.approx([1.0, 1.0])
    assert shape(0.5, 2.0, 1.0) == pytest.approx(1.5)
    assert linear(0.25, 2.0, 1.0) == 1.75
    assert cosine(0.25, 2.0, 1.0) == pytest.approx(1 + 0.5 * (1 + math.sqrt(0.5)))
