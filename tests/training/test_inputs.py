"""The inputs of a step are a function of its number; the processes of a host share its cores for decoding."""

import os
import statistics
from dataclasses import replace
from itertools import islice

import pytest
import torch
from tiny_run import CPU, tiny_config

from stop_mim.errors import InputError
from stop_mim.training.config import EncoderConfig, MaskConfig, OptimConfig, SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.inputs import MAX_DEFAULT_WORKERS, StepInputs, split_batch, workers_for


def are_equal(one, other):
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_a_graph_of_masks_that_change_their_size_is_refused():
    config = TrainConfig(masks=MaskConfig(compat="release"), speed=SpeedConfig(graph=True))
    with pytest.raises(InputError, match=r"speed\.graph is True and masks\.compat release"):
        StepInputs(config, Ranks(0, 1, 1, torch.device("cuda")))


def test_no_two_batches_are_alike_and_none_of_another_process():
    def two_steps(rank):
        config = tiny_config()
        config = replace(config, optim=replace(config.optim, batch_size=16))
        inputs = StepInputs(config, Ranks(rank, 2, 2, CPU))
        steps = list(islice(inputs.starting_at(inputs.open_images(), 0), 2))
        assert [len(step) for step in steps] == [2, 2]
        return [(images, masks.context, masks.targets) for step in steps for images, masks in step]

    mine, others = two_steps(rank=0), two_steps(rank=1)
    for number, batch in enumerate(mine):
        assert not any(any(are_equal(batch, other)) for other in mine[number + 1 :] + others)


def test_released_masks_are_of_64_images_whatever_the_batch_per_device():
    """Cut to the shortest of 64 images, 52 of 82 context patches are left on 14x14; of 2048, 28."""

    def steps(processes, per_device):
        config = TrainConfig(
            masks=MaskConfig(compat="release"),
            encoder=EncoderConfig(width=32, depth=1, heads=2),
            optim=OptimConfig(batch_size=512),
            speed=SpeedConfig(batch_size_per_device=per_device),
        )
        inputs = [StepInputs(config, Ranks(rank, processes, processes, CPU)) for rank in range(processes)]
        assert {one.per_device for one in inputs} == {min(per_device, 64)}
        return [masks for together in zip(*(one.draw_masks(3) for one in inputs), strict=True) for masks in together]

    alone, shared, divided = steps(1, 512), steps(2, 128), steps(2, 16)
    assert statistics.mean(masks.context.shape[1] for masks in alone) == pytest.approx(53, abs=5)
    assert all(are_equal((a.context, a.targets), (b.context, b.targets)) for a, b in zip(alone, shared, strict=True))
    assert len({masks.targets.shape[2] for masks in alone}) > 1
    # Devices with fewer images share the masks of 64.
    assert sorted(row for masks in divided for row in masks.context.tolist()) == sorted(
        row for masks in alone for row in masks.context.tolist()
    )


def test_a_batch_that_cannot_share_released_masks_is_refused():
    for total, per_device in ((96, 16), (192, 48)):
        config = TrainConfig(masks=MaskConfig(compat="release"), speed=SpeedConfig(batch_size_per_device=per_device))
        with pytest.raises(InputError, match=f"optim.batch_size is {total} with {per_device} .*masks for 64"):
            split_batch(replace(config, optim=OptimConfig(batch_size=total)), Ranks(0, 2, 2, CPU))


@pytest.mark.parametrize(("cores", "processes", "expected"), [(4, 1, 4), (4, 2, 2), (2, 4, 1), (64, 1, None)])
def test_processes_of_a_host_share_its_cores_unless_workers_are_given(monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    ranks = Ranks(0, processes, processes, CPU)
    assert workers_for(SpeedConfig(), ranks) == (expected or MAX_DEFAULT_WORKERS)
    assert workers_for(SpeedConfig(workers=0), ranks) == 0


def test_batches_are_split_over_devices_and_accumulated():
    def split(batch_size, per_device, world_size):
        config = TrainConfig(speed=SpeedConfig(batch_size_per_device=per_device))
        config = replace(config, optim=replace(config.optim, batch_size=batch_size))
        return split_batch(config, Ranks(0, world_size, world_size, CPU))

    assert [split(*case) for case in ((64, None, 1), (64, None, 4), (64, 8, 4))] == [(64, 1), (16, 1), (8, 2)]
    for refused, multiple in (((64, 8, 3), 24), ((64, 128, 1), 128), ((2, None, 4), 4), ((64, None, 3), 3)):
        with pytest.raises(InputError, match=rf"optim.batch_size is {refused[0]}: .* multiple of {multiple} \("):
            split(*refused)
