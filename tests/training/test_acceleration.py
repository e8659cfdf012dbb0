"""What makes steps faster changes nothing in them: which of it is chosen, what is refused, and what happens if it fails."""

import contextlib
from dataclasses import replace

import pytest
import torch
from stepping import assert_same_state, make_batches, make_step, state_of, take, values_of
from tiny_run import CPU, STRONG, tiny_config, write_images

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.kernels.fast import is_half
from stop_mim.training.acceleration import (
    CapturedStep,
    CompiledStep,
    accelerate,
    autocast_for,
    is_compiled,
    require_possible,
)
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig, SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import TrainingStep, read_outcomes

GPU = torch.device("cuda")


def silent(text):
    raise AssertionError(text)


def kinds(speed, steps, device, world_size=1, fixed_shapes=True):
    """What a step becomes, from the outside in; nothing is run, so that the device need not be there."""
    step = make_step()
    step.ranks = Ranks(0, world_size, world_size, device)
    found = accelerate(step, speed, steps, silent, silent, fixed_shapes)
    names = []
    while isinstance(found, CapturedStep | CompiledStep):
        names.append(type(found).__name__)
        found = found._first if isinstance(found, CapturedStep) else found._step
    assert isinstance(found, TrainingStep)
    assert is_compiled(found.objective) == ("CompiledStep" in names)
    return names


@pytest.mark.parametrize(
    ("options", "steps", "device", "world_size", "expected"),
    [
        ({}, 500, GPU, 1, ["CapturedStep", "CompiledStep"]),
        ({}, 499, GPU, 1, ["CapturedStep"]),
        ({}, 19, GPU, 1, []),
        ({}, 500, GPU, 2, ["CompiledStep"]),
        ({}, 1_000_000, CPU, 1, []),
        ({"compile": True}, 1, CPU, 1, ["CompiledStep"]),
        ({"compile": True, "graph": False}, 500, GPU, 1, ["CompiledStep"]),
        ({"compile": False, "graph": False}, 1_000_000, GPU, 1, []),
        ({"graph": True}, 1, GPU, 1, ["CapturedStep"]),
    ],
)
def test_device_processes_and_length_decide_what_is_not_given(options, steps, device, world_size, expected):
    assert kinds(SpeedConfig(**options), steps, device, world_size) == expected
    if not any(options.values()):
        assert kinds(SpeedConfig(**options), steps, device, world_size, fixed_shapes=False) == []


def test_half_precision_is_the_gpus_unless_it_is_said():
    cases = [("auto", CPU), ("auto", GPU), ("bf16", CPU), ("bf16", GPU), ("fp32", CPU), ("fp32", GPU)]
    assert [is_half(*case) for case in cases] == [False, True, True, True, False, False]
    assert isinstance(autocast_for("auto", CPU), contextlib.nullcontext)
    with autocast_for("bf16", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_graphs_need_one_process_with_a_gpu():
    for device, world_size in ((CPU, 1), (GPU, 2)):
        with pytest.raises(InputError, match=r"speed.graph is True"):
            require_possible(SpeedConfig(graph=True), Ranks(0, world_size, world_size, device))


class CompilerFailure(Exception):
    pass


def break_compiler(monkeypatch, failing_call, error, in_backward=False):
    """Compiled calls are plain ones, but for one that fails; the calls are counted."""
    calls = []

    def fail(gradient=None):
        raise error

    def compiled(call):
        def run(*arguments, **options):
            calls.append(1)
            if len(calls) != failing_call:
                return call(*arguments, **options)
            if not in_backward:
                fail()
            loss = call(*arguments, **options)
            loss.register_hook(fail)
            return loss

        return run

    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled(call))
    return calls


@pytest.mark.parametrize(("failing_call", "in_backward"), [(1, False), (2, True)])
def test_a_model_that_cannot_be_compiled_trains_as_it_would_have_without(monkeypatch, failing_call, in_backward):
    plain = make_step()
    expected = take(plain, range(3))
    error = CompilerFailure("no compiler\n and a long story about it")
    calls = break_compiler(monkeypatch, failing_call, error, in_backward)
    said, warned = [], []
    step = make_step()
    fallen_back = accelerate(step, SpeedConfig("cpu", compile=True), 3, said.append, warned.append)
    assert take(fallen_back, range(3)) == expected
    assert_same_state(state_of(step), state_of(plain))
    assert warned == ["The model could not be compiled (no compiler): training continues uncompiled, more slowly."]
    assert len(said) == 1
    # The second step does not try again.
    assert len(calls) == failing_call
    assert not is_compiled(step.objective)


@pytest.mark.parametrize(
    ("failing_call", "error"),
    [
        (1, torch.OutOfMemoryError("out of memory")),
        # A model that was compiled once does not fail for want of a compiler.
        (3, CompilerFailure("later")),
    ],
)
def test_what_is_no_failure_to_compile_is_not_hidden(monkeypatch, failing_call, error):
    break_compiler(monkeypatch, failing_call, error)
    step = accelerate(make_step(), SpeedConfig("cpu", compile=True), 3, lambda text: None, silent)
    with pytest.raises(type(error)):
        take(step, range(2))


def on_gpu(step, speed=None):
    """The step as a run on a GPU has it: with fast kernels, captured."""
    speed = speed or SpeedConfig(compile=False, graph=True)
    return accelerate(step, speed, 100, silent, silent)


def gpu_step(precision="auto", **options):
    return make_step(GPU, autocast_for(precision, GPU), **options)


def gpu_batches(number, count=2):
    batches = make_batches(number, count)
    return [(images.to(GPU), Masks(masks.context.to(GPU), masks.targets.to(GPU))) for images, masks in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.05},
        {"objective": ObjectiveConfig(target_resolution="max")},
        {"positions": PositionsConfig(apply_to="both")},
    ],
    ids=["plain", "clipped", "two resolutions", "noise on both"],
)
def test_captured_steps_are_plain_steps(precision, options):
    ends = []
    for graph in (False, True):
        step = gpu_step(precision, **options)
        accelerated = on_gpu(step, SpeedConfig(precision=precision, compile=False, graph=graph))
        ends.append((take(accelerated, range(10), gpu_batches), state_of(step)))
    assert accelerated._recorded is not None
    (plain, plain_end), (captured_outcomes, end) = ends
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
    train(tiny_config(data, tmp_path / "whole", speed=speed, positions=STRONG))
    train(tiny_config(data, tmp_path / "parts", speed=speed, positions=STRONG, stop_after_steps=10))
    resume(tmp_path / "parts")
    plain = replace(speed, graph=False, recompute=False)
    train(tiny_config(data, tmp_path / "plain", speed=plain, positions=STRONG))
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
