"""What makes steps faster changes nothing in them: which of it is chosen, what is refused, and what happens if it fails."""

import contextlib
from dataclasses import replace

import pytest
import torch
from stepping import (
    DROPPING_ENCODER,
    PLAIN_ENCODER,
    assert_same_state,
    make_batches,
    make_step,
    state_of,
    take,
)
from tiny_run import CPU, tiny_objective

from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.training.acceleration import (
    CapturedStep,
    CompiledStep,
    accelerate,
    autocast_for,
    is_compiled,
    is_half,
    prepare_objective,
    require_possible,
)
from stop_mim.training.config import MaskConfig, ObjectiveConfig, SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.step import TrainingStep

GPU = torch.device("cuda")
MAE = {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")}


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


def test_batches_of_changing_shapes_are_neither_compiled_nor_captured_unless_somebody_wants_it():
    assert kinds(SpeedConfig(), 500, GPU, fixed_shapes=False) == []
    assert kinds(SpeedConfig(compile=True), 500, GPU, fixed_shapes=False) == ["CompiledStep"]


@pytest.mark.parametrize(
    ("options", "steps", "device", "world_size", "expected"),
    [
        ({}, 500, GPU, 1, ["CapturedStep", "CompiledStep"]),
        ({}, 499, GPU, 1, ["CapturedStep"]),
        ({}, 20, GPU, 1, ["CapturedStep"]),
        ({}, 19, GPU, 1, []),
        ({}, 500, GPU, 2, ["CompiledStep"]),
        ({}, 499, GPU, 2, []),
        ({}, 1_000_000, CPU, 1, []),
        ({"compile": True}, 1, CPU, 1, ["CompiledStep"]),
        ({"compile": True}, 1, GPU, 1, ["CompiledStep"]),
        ({"compile": True, "graph": False}, 500, GPU, 1, ["CompiledStep"]),
        ({"compile": False}, 1_000_000, GPU, 1, ["CapturedStep"]),
        ({"compile": False, "graph": False}, 1_000_000, GPU, 1, []),
        ({"graph": True}, 1, GPU, 1, ["CapturedStep"]),
        ({"graph": False}, 1_000_000, CPU, 1, []),
    ],
)
def test_what_is_not_said_is_chosen_by_device_processes_and_length(options, steps, device, world_size, expected):
    assert kinds(SpeedConfig(**options), steps, device, world_size) == expected


def test_half_precision_is_the_gpus_unless_it_is_said():
    cases = [("auto", CPU), ("auto", GPU), ("bf16", CPU), ("bf16", GPU), ("fp32", CPU), ("fp32", GPU)]
    assert [is_half(*case) for case in cases] == [False, True, True, True, False, False]
    assert isinstance(autocast_for("auto", CPU), contextlib.nullcontext)
    with autocast_for("bf16", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def refusal(speed, device=CPU, world_size=1, **groups):
    with pytest.raises(InputError) as raised:
        require_possible(tiny_objective(**groups), speed, Ranks(0, world_size, world_size, device))
    assert str(raised.value).endswith(".")
    return str(raised.value)


def test_graphs_need_one_process_with_a_gpu():
    for device, world_size in ((CPU, 1), (GPU, 2)):
        assert "speed.graph is True" in refusal(SpeedConfig(graph=True), device, world_size)


def test_bf16_between_layers_needs_bf16():
    assert "speed.half_residual is True" in refusal(SpeedConfig(half_residual=True))
    assert "speed.half_residual is True" in refusal(SpeedConfig(half_residual=True, precision="fp32"), GPU)
    require_possible(tiny_objective(), SpeedConfig(half_residual=True, precision="bf16"), Ranks(0, 1, 1, CPU))


def test_targets_in_eight_bits_need_a_gpu_that_can_and_plain_targets(monkeypatch):
    wanted = SpeedConfig(fp8_target=True)
    assert "speed.fp8_target is True on cpu" in refusal(wanted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "speed.fp8_target is True on cuda" in refusal(wanted, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "speed.precision bf16" in refusal(replace(wanted, precision="fp32"), GPU)
    for groups in (
        MAE,
        {"objective": ObjectiveConfig(target_layers=2)},
        {"objective": ObjectiveConfig(target_resolution="max")},
    ):
        assert "objective ijepa with objective.target_layers 1" in refusal(wanted, GPU, **groups)
    objective = tiny_objective()
    require_possible(objective, wanted, Ranks(0, 1, 1, GPU))
    prepare_objective(objective, wanted, GPU)
    assert objective.frozen_precision == "fp8"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--speed.fp8-target", "speed.fp8_target is True on cpu"),
        ("--speed.graph True", "speed.graph is True"),
        ("--speed.half-residual", "speed.half_residual is True"),
    ],
)
def test_what_this_machine_cannot_do_is_one_sentence_and_leaves_no_folder(capsys, tmp_path, option, words):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "demo", "--speed.device", "cpu", "--out", str(out), *option.split()])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert lines[-1].startswith(f"stop-mim: {words}")
    assert not out.exists()


def test_the_target_is_frozen_in_half_precision_on_a_gpu_alone():
    for speed, device, expected in (
        (SpeedConfig(), GPU, "bf16"),
        (SpeedConfig(precision="fp32"), GPU, None),
        (SpeedConfig(precision="bf16"), CPU, None),
    ):
        objective = tiny_objective()
        prepare_objective(objective, speed, device)
        assert objective.frozen_precision == expected


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


@pytest.mark.parametrize(("failing_call", "in_backward"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_model_that_cannot_be_compiled_trains_as_it_would_have_without(monkeypatch, failing_call, in_backward):
    plain = make_step(encoder=DROPPING_ENCODER)
    expected = take(plain, range(3))
    error = CompilerFailure("no compiler\n and a long story about it")
    calls = break_compiler(monkeypatch, failing_call, error, in_backward)
    said, warned = [], []
    step = make_step(encoder=DROPPING_ENCODER)
    fallen_back = accelerate(step, SpeedConfig("cpu", compile=True), 3, said.append, warned.append)
    assert take(fallen_back, range(3)) == expected
    assert_same_state(state_of(step), state_of(plain))
    assert warned == ["The model could not be compiled (no compiler): it trains without, slower."]
    assert len(said) == 1
    # The second step does not try again.
    assert len(calls) == failing_call
    assert not is_compiled(step.objective)


def test_a_failure_without_a_message_has_a_name(monkeypatch):
    break_compiler(monkeypatch, 1, CompilerFailure())
    warned = []
    take(accelerate(make_step(), SpeedConfig("cpu", compile=True), 3, lambda text: None, warned.append), [0])
    assert "(CompilerFailure)" in warned[0]


@pytest.mark.parametrize(
    ("failing_call", "error"),
    [
        (1, torch.OutOfMemoryError("out of memory")),
        (1, InputError("These images do not fit.")),
        (1, KeyboardInterrupt()),
        # A model that was compiled once does not fail for want of a compiler.
        (3, CompilerFailure("later")),
    ],
)
def test_what_is_no_failure_to_compile_is_not_hidden(monkeypatch, failing_call, error):
    break_compiler(monkeypatch, failing_call, error)
    step = accelerate(make_step(), SpeedConfig("cpu", compile=True), 3, lambda text: None, silent)
    with pytest.raises(type(error)):
        take(step, range(2))


def gradients(step, seed=0):
    """Loss and gradients of a batch, and how many numbers were kept for them outside the layers and for their inputs."""
    kept, inputs = [], []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in step.objective.layers()
    ]
    torch.manual_seed(seed)
    step.objective.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.objective(*make_batches(0, 1, images=16)[0])
    loss.backward()
    for hook in hooks:
        hook.remove()
    found = {name: p.grad for name, p in step.objective.named_parameters() if p.grad is not None}
    return loss, found, sum(kept) + sum(tokens.numel() for tokens in inputs if tokens.requires_grad)


@pytest.mark.parametrize("encoder", [PLAIN_ENCODER, DROPPING_ENCODER], ids=["plain", "drop path"])
@pytest.mark.parametrize("groups", [{}, MAE], ids=["ijepa", "mae"])
def test_recomputed_layers_have_the_same_gradients_and_keep_less(encoder, groups):
    plain, recomputing = (make_step(encoder=encoder, **groups) for _ in range(2))
    prepare_objective(recomputing.objective, SpeedConfig("cpu", recompute=True), CPU)
    loss, expected, all_kept = gradients(plain)
    recomputed_loss, found, kept = gradients(recomputing)
    assert torch.equal(loss, recomputed_loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
    assert kept < 0.5 * all_kept


def test_bf16_between_layers_is_close_and_keeps_less_of_them():
    plain, halved = (make_step(autocast=autocast_for("bf16", CPU)) for _ in range(2))
    prepare_objective(halved.objective, SpeedConfig("cpu", "bf16", half_residual=True), CPU)
    seen = []
    for step in (plain, halved):
        step.objective.encoder.vit.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    ours, theirs = take(halved, range(3)), take(plain, range(3))
    assert set(seen[: len(seen) // 2]) == {torch.bfloat16}
    assert set(seen[len(seen) // 2 :]) == {torch.float32}
    assert [one.loss for one in ours] == pytest.approx([one.loss for one in theirs], rel=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in halved.objective.parameters())
