"""The inputs of a step are a function of its number; the processes of a host share its cores for decoding."""

import os
from dataclasses import replace
from itertools import islice

import pytest
import torch
from tiny_run import CPU, tiny_config

from stop_mim.data.bad_images import BadImages
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import MaskConfig, SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.inputs import MAX_DEFAULT_WORKERS, StepInputs, workers_for


def open_inputs(rank, processes):
    """The inputs of one of some processes, with their batches."""
    config = tiny_config()
    config = replace(config, optim=replace(config.optim, batch_size=8 * processes))
    inputs, source = StepInputs(config, Ranks(rank, processes, processes, CPU)), open_source(config.data)
    return inputs, inputs.open_batches(source, BadImages(source.name, len(source)), ProgressDisplay(shown=False))


def batches_of_steps(first, last, rank=0, processes=1):
    """Each tensor that the steps are given, batch by batch."""
    inputs, batches = open_inputs(rank, processes)
    images = batches.starting_at(first * inputs.batches_per_step)
    steps = list(islice(inputs.with_masks(images, first), last - first))
    assert [len(step) for step in steps] == [2] * (last - first)
    return [(images, masks.context, masks.targets) for step in steps for images, masks in step]


def are_equal(one, other):
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_a_graph_of_masks_that_change_their_size_is_refused():
    config = replace(tiny_config(), masks=MaskConfig(compat="release"), speed=SpeedConfig(graph=True))
    with pytest.raises(InputError, match=r"speed\.graph is True and masks\.compat release"):
        StepInputs(config, Ranks(0, 1, 1, torch.device("cuda")))
    assert StepInputs(replace(config, masks=MaskConfig()), Ranks(0, 1, 1, torch.device("cuda"))).masks.has_fixed_counts


def test_any_step_can_be_the_first():
    for one, other in zip(batches_of_steps(0, 9)[10:], batches_of_steps(5, 9), strict=True):
        assert all(are_equal(one, other))


def test_no_two_batches_are_alike_and_none_of_another_process():
    mine, others = batches_of_steps(0, 2, rank=0, processes=2), batches_of_steps(0, 2, rank=1, processes=2)
    for number, batch in enumerate(mine):
        assert not any(any(are_equal(batch, other)) for other in mine[number + 1 :] + others)


def test_an_image_is_seen_by_one_process_alone():
    orders = [open_inputs(rank, 2)[1].order for rank in range(2)]
    seen = torch.cat([order.indices(batch) for order in orders for batch in range(order.batches_per_epoch)])
    assert len(seen) == len(seen.unique()) == 48


@pytest.mark.parametrize(("cores", "processes", "expected"), [(4, 1, 4), (4, 2, 2), (2, 4, 1), (64, 1, None)])
def test_processes_of_a_host_share_its_cores_unless_workers_are_given(monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    ranks = Ranks(0, processes, processes, CPU)
    assert workers_for(SpeedConfig(), ranks) == (expected or MAX_DEFAULT_WORKERS)
    assert workers_for(SpeedConfig(workers=0), ranks) == 0
