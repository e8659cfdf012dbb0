"""Steps that are captured as a CUDA graph and replayed, and batches that are made meanwhile."""

from dataclasses import replace

import pytest
import torch
from quiet_run import MOVING
from stepping import (
    assert_same_state,
    make_batches,
    make_step,
    state_of,
    take,
    values_of,
)
from tiny_run import tiny_config, write_images

from stop_mim.masking import Masks
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig, SpeedConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import read_outcomes

GPU = torch.device("cuda")


def silent(text):
    raise AssertionError(text)


def on_gpu(step, speed=None):
    """The step as a run on a GPU has it: with fast kernels, captured."""
    speed = speed or SpeedConfig(compile=False, graph=True)
    return accelerate(step, speed, 100, silent, silent)


def gpu_step(precision="auto", **options):
    return make_step(GPU, autocast_for(precision, GPU), **options)


def on_device(batches):
    return [(images.to(GPU), Masks(masks.context.to(GPU), masks.targets.to(GPU))) for images, masks in batches]


def gpu_batches(number, count=2):
    return on_device(make_batches(number, count))


def both_ways(numbers, precision="auto", prepare=lambda step: None, **options):
    """The outcomes of plain and of captured steps, and the two ends."""
    ends = []
    for graph in (False, True):
        step = gpu_step(precision, **options)
        prepare(step)
        accelerated = on_gpu(step, SpeedConfig(precision=precision, compile=False, graph=graph))
        outcomes = take(accelerated, numbers, gpu_batches)
        if graph:
            assert accelerated._recorded is not None
        ends.append((outcomes, state_of(step)))
    return ends


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.05},
        {"objective": ObjectiveConfig(target_layers=2)},
        {"positions": PositionsConfig("jittered", apply_to="both")},
    ],
    ids=["plain", "clipped", "two layers", "jittered"],
)
def test_captured_steps_are_plain_steps(precision, options):
    (plain, plain_end), (captured_outcomes, end) = both_ways(range(10), precision, **options)
    losses = [outcome.loss for outcome in plain]
    assert len(set(losses)) == 10
    tolerance = 1e-5 if precision == "fp32" else 5e-3
    assert [outcome.loss for outcome in captured_outcomes] == pytest.approx(losses, rel=tolerance)
    norms = [outcome.gradient_norm for outcome in plain]
    assert [outcome.gradient_norm for outcome in captured_outcomes] == pytest.approx(norms, rel=20 * tolerance)
    assert end.keys() == plain_end.keys()
    for name, tensor in end.items():
        # Adam moves a weight by about the learning rate whatever the size of its gradient, rounding included.
        torch.testing.assert_close(tensor, plain_end[name], atol=1e-3 if precision == "fp32" else 1e-2, rtol=0.02)
    assert {tensor.item() for name, tensor in end.items() if ".step." in name} == {10.0}


@pytest.mark.gpu
def test_a_captured_step_that_is_not_finite_changes_no_bit():
    step = gpu_step()
    accelerated = on_gpu(step)
    take(accelerated, range(6), gpu_batches)
    before = state_of(step)
    (images, masks), good = gpu_batches(6)
    (outcome,) = read_outcomes([accelerated([(images * float("nan"), masks), good], values_of(6), 6)])
    assert not outcome.updated
    assert_same_state(before, state_of(step))
    (outcome,) = take(accelerated, [7], gpu_batches)
    assert outcome.updated
    changed = [name for name, tensor in state_of(step).items() if not torch.equal(tensor, before[name])]
    assert len(changed) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mae", "data2vec"])
def test_other_objectives_can_be_captured(tmp_path, kind):
    objective = ObjectiveConfig(kind, target_layers=2 if kind == "data2vec" else 1)
    masks = MaskConfig("random" if kind == "mae" else "blockwise")
    speed = SpeedConfig("cuda", batch_size_per_device=4, workers=0, compile=False, graph=True)
    losses = []
    for graph in (False, True):
        out = tmp_path / str(graph)
        train(tiny_config(out=out, objective=objective, masks=masks, speed=replace(speed, graph=graph)))
        assert "could not be captured" not in (out / "log.txt").read_text()
        losses.append([line["loss"] for line in read_metrics(out)])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_captured_run_goes_on_where_it_stopped(tmp_path, loader, recompute):
    data = write_images(tmp_path / "images")
    speed = SpeedConfig("cuda", "auto", 4, loader, 2, compile=False, graph=True, recompute=recompute)
    # A sigma that moves: under a capture it is a tensor like all that is scheduled.
    train(tiny_config(data, tmp_path / "whole", speed=speed, positions=MOVING))
    train(tiny_config(data, tmp_path / "parts", speed=speed, positions=MOVING, stop_after_steps=10))
    resume(tmp_path / "parts")
    plain = replace(speed, graph=False, recompute=False)
    train(tiny_config(data, tmp_path / "plain", speed=plain, positions=MOVING))
    assert "could not be captured" not in (tmp_path / "whole" / "log.txt").read_text()
    losses = {name: [line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "parts", "plain")}
    # Not to the bit: a resumed run takes its first steps plainly, and cuBLAS may choose another algorithm for a product
    # on another stream. bf16 rounds to 0.4%, and the loss is a mean over thousands of such values.
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-3)
    assert losses["plain"] == pytest.approx(losses["whole"], rel=1e-3)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_taken_plainly():
    step, warned = gpu_step(), []

    def refuse(module, arguments):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this model waits for the device")

    step.objective.register_forward_pre_hook(refuse)
    accelerated = accelerate(step, SpeedConfig(compile=False, graph=True), 100, silent, warned.append)
    assert all(outcome.updated for outcome in take(accelerated, range(6), gpu_batches))
    assert len(warned) == 1
    assert "could not be captured as a CUDA graph (this model waits for the device)" in warned[0]
