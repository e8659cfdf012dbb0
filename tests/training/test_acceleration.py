"""What makes steps faster changes nothing in them: which of it is chosen, what is refused, and what happens if it fails."""

import contextlib

import pytest
import torch
from stepping import (
    assert_same_state,
    make_step,
    state_of,
    take,
)
from tiny_run import CPU

from stop_mim.errors import InputError
from stop_mim.models.kernels.fast import is_half
from stop_mim.training.acceleration import (
    CapturedStep,
    CompiledStep,
    accelerate,
    autocast_for,
    is_compiled,
    require_possible,
)
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.step import TrainingStep

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
    assert warned == ["The model could not be compiled (no compiler): it trains without, slower."]
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
