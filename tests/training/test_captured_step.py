"""Steps that are recorded once and replayed, and batches that are made beside them.

Where there is no GPU, a pretended graph shows that a captured step hands the right things to a replay.
"""

import contextlib
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from stepping import (
    DROPPING_ENCODER,
    assert_same_state,
    make_batches,
    make_step,
    state_of,
    take,
    values_of,
)
from tiny_run import CPU, tiny_config, write_images

from stop_mim.data.lookahead import prefetched
from stop_mim.masking import MultiBlockMasks
from stop_mim.training.acceleration import STEPS_BEFORE_CAPTURE, CapturedStep, accelerate, autocast_for
from stop_mim.training.checkpoint import collect_tensors
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig, PredictorConfig, SpeedConfig
from stop_mim.training.loop import resume, train
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import TrainingStep, read_outcomes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = torch.device("cuda")


def silent(text):
    raise AssertionError(text)


class PretendedGraph:
    """What a CUDA graph does, on the CPU: recording changes nothing, and a replay reads and writes where it was recorded."""

    step: TrainingStep
    instances: ClassVar[list["PretendedGraph"]] = []
    # To whoever asks it is what it pretends to be.
    __class__ = torch.cuda.CUDAGraph

    def __init__(self):
        self.replays = 0
        self.instances.append(self)

    @contextlib.contextmanager
    def recording(self):
        before = state_of(self.step)
        draws = torch.get_rng_state()
        run = TrainingStep.run

        def recorded(step, batches):
            self.batches, self.outcome = batches, run(step, batches)
            return self.outcome

        TrainingStep.run = recorded
        try:
            yield
        finally:
            TrainingStep.run = run
        for name, tensor in collect_tensors(self.step.objective, self.step.optimiser).items():
            tensor.detach().copy_(before[name])
        torch.set_rng_state(draws)
        self.outcome.fill_(float("nan"))

    def replay(self):
        self.replays += 1
        self.outcome.copy_(self.step.run(self.batches))


class PretendedStream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def pretended_gpu(monkeypatch):
    """torch.cuda as far as a captured step needs it."""
    monkeypatch.setattr(PretendedGraph, "instances", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: graph.recording())
    monkeypatch.setattr(torch.cuda, "Stream", PretendedStream)
    monkeypatch.setattr(torch.cuda, "current_stream", PretendedStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return monkeypatch


def captured(step, warn=silent, first=None):
    PretendedGraph.step = step
    return CapturedStep(step, first or step, warn)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_replays_take_the_steps_that_would_have_been_taken(pretended_gpu, clip):
    plain, step = make_step(encoder=DROPPING_ENCODER, clip=clip), make_step(encoder=DROPPING_ENCODER, clip=clip)
    expected = take(plain, range(8))
    assert take(captured(step), range(8)) == expected
    assert_same_state(state_of(step), state_of(plain))
    (graph,) = PretendedGraph.instances
    assert graph.replays == 8 - STEPS_BEFORE_CAPTURE
    assert len({outcome.loss for outcome in expected}) == 8


def test_a_replay_leaves_the_given_batches_and_earlier_outcomes_alone(pretended_gpu):
    step = captured(make_step())
    batches = [make_batches(number) for number in range(6)]
    outcomes = [step(batch, values_of(number), number) for number, batch in enumerate(batches)]
    assert len({outcome.loss for outcome in read_outcomes(outcomes)}) == 6
    for number, batch in enumerate(batches):
        for (images, masks), (same_images, same_masks) in zip(batch, make_batches(number), strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(masks.context, same_masks.context)
            assert torch.equal(masks.targets, same_masks.targets)


def test_a_replay_that_is_not_finite_changes_no_bit(pretended_gpu):
    step = make_step()
    replayed = captured(step)
    take(replayed, range(5))
    before = state_of(step)
    (images, masks), good = make_batches(5)
    assert not read_outcomes([replayed([(images * float("nan"), masks), good], values_of(5), 5)])[0].updated
    assert_same_state(before, state_of(step))
    assert take(replayed, [6])[0].updated


@pytest.mark.parametrize("error", [RuntimeError("an operation waits\nfor the device"), RuntimeError()])
def test_a_step_that_cannot_be_captured_is_taken_plainly_from_there_on(pretended_gpu, error):
    @contextlib.contextmanager
    def recording(graph, **options):
        attempts.append(graph)
        raise error
        yield

    attempts, warned = [], []
    pretended_gpu.setattr(torch.cuda, "graph", recording)
    plain, step = make_step(), make_step()
    expected = take(plain, range(6))
    assert take(captured(step, warned.append), range(6)) == expected
    assert_same_state(state_of(step), state_of(plain))
    assert len(attempts) == len(warned) == 1
    reason = "an operation waits" if str(error) else "RuntimeError"
    assert f"could not be captured as a CUDA graph ({reason}): it trains without" in warned[0]


def test_batches_of_changing_shapes_are_trained_on_plainly(pretended_gpu):
    def batches(number):
        return make_batches(number, sampler=MultiBlockMasks(4, context_tokens=3 if number < 5 else 2))

    plain, step, warned = make_step(), make_step(), []
    expected = take(plain, range(8), batches)
    assert take(captured(step, warned.append), range(8), batches) == expected
    assert_same_state(state_of(step), state_of(plain))
    (graph,) = PretendedGraph.instances
    assert graph.replays == 5 - STEPS_BEFORE_CAPTURE
    assert len(warned) == 1
    assert "the shapes of its batches change" in warned[0]


def test_want_of_memory_in_a_capture_is_told(pretended_gpu):
    @contextlib.contextmanager
    def recording(graph, **options):
        raise torch.OutOfMemoryError("out of memory")
        yield

    pretended_gpu.setattr(torch.cuda, "graph", recording)
    with pytest.raises(torch.OutOfMemoryError):
        take(captured(make_step()), range(6))


def test_what_follows_a_failed_capture_is_still_compiled(pretended_gpu):
    @contextlib.contextmanager
    def recording(graph, **options):
        raise RuntimeError("no")
        yield

    pretended_gpu.setattr(torch.cuda, "graph", recording)
    step, taken = make_step(), []

    def first(*arguments):
        taken.append(arguments)
        return step(*arguments)

    take(captured(step, lambda text: None, first), range(6))
    assert len(taken) == 6


def test_on_the_cpu_batches_pass_as_they_are():
    batches = [make_batches(number) for number in range(3)]
    passed = list(prefetched(iter(batches), CPU))
    assert all(one is other for one, other in zip(passed, batches, strict=True))


def test_on_the_cpu_no_batch_is_made_before_it_is_wanted():
    made = []

    def make():
        for number in range(3):
            made.append(number)
            yield make_batches(number)

    inputs = prefetched(make(), CPU)
    next(inputs)
    assert made == [0]


def on_gpu(step, speed=None):
    """The step captured, with the layers and the target's precision of a GPU, as it would be in a run."""
    speed = speed or SpeedConfig(compile=False, graph=True)
    return accelerate(step, speed, 100, silent, silent)


def gpu_step(precision="auto", **options):
    return make_step(GPU, autocast_for(precision, GPU), **options)


def gpu_batches(number, count=2):
    batches = make_batches(number, count)
    return [(images.to(GPU), type(masks)(masks.context.to(GPU), masks.targets.to(GPU))) for images, masks in batches]


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


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoder": DROPPING_ENCODER},
        {"clip": 0.05},
        {"predictor": PredictorConfig(width=32, depth=1, heads=2, shared_context=True)},
        {"objective": ObjectiveConfig(target_layers=2)},
    ],
    ids=["plain", "drop path", "clipped", "shared context", "two layers"],
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


@needs_gpu
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


@needs_gpu
def test_schedules_move_under_a_capture():
    step = gpu_step(positions=PositionsConfig(sigma=0.0))
    accelerated = on_gpu(step)
    take(accelerated, range(5), gpu_batches)
    weight, bias = step.objective.predictor.head.weight, step.objective.predictor.head.bias
    scheduled = type(values_of(0))
    before, target = state_of(step), [p.clone() for p in step.objective.target.parameters()]
    accelerated(gpu_batches(5), scheduled(lr=0.0, weight_decay=0.5, ema_momentum=1.0), 5)
    assert torch.equal(weight, before["model.predictor.head.weight"])
    assert all(torch.equal(one, other) for one, other in zip(target, step.objective.target.parameters(), strict=True))
    moved = []
    for lr in (1e-4, 1e-2):
        old = bias.clone()
        accelerated(gpu_batches(6), scheduled(lr, 0.0, 1.0), 6)
        moved.append((bias - old).norm())
    assert 50 < moved[1] / moved[0] < 200
    # Decay alone: with and without it from the same state, the weights differ by the decay.
    old, ends = weight.clone(), []
    kept = state_of(step)
    for decay in (0.0, 0.5):
        for name, tensor in collect_tensors(step.objective, step.optimiser).items():
            tensor.detach().copy_(kept[name])
        accelerated(gpu_batches(7), scheduled(0.01, decay, 1.0), 7)
        ends.append(weight.clone())
    torch.testing.assert_close(ends[0] - ends[1], 0.005 * old, atol=1e-5, rtol=1e-2)
    accelerated(gpu_batches(8), scheduled(0.01, 0.0, 0.0), 8)
    pairs = zip(step.objective.target.parameters(), step.objective.encoder.parameters(), strict=True)
    for theirs, ours in pairs:
        torch.testing.assert_close(theirs, ours)


@needs_gpu
def test_noise_follows_seed_and_sigma_under_a_capture():
    step = gpu_step()
    accelerated = on_gpu(step)
    take(accelerated, range(5), gpu_batches)
    still = type(values_of(0))(lr=0.0, weight_decay=0.0, ema_momentum=1.0)

    def loss(seed):
        return read_outcomes([accelerated(gpu_batches(9), still, seed)])[0].loss

    assert loss(1) == loss(1)
    assert len({loss(seed) for seed in range(6)}) == 6
    step.objective.positions.set_sigma(0.0)
    assert len({loss(seed) for seed in range(6)}) == 1
    losses = {}
    for sigma in (0.0, 0.01, 25.0):
        step.objective.positions.set_sigma(sigma)
        losses[sigma] = [loss(seed) for seed in range(6)]
    spread = {sigma: max(found) - min(found) for sigma, found in losses.items()}
    assert spread[0.0] == 0 < spread[0.01] < spread[25.0]


@needs_gpu
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


@needs_gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_captured_run_goes_on_where_it_stopped(tmp_path, loader, recompute):
    data = write_images(tmp_path / "images")
    speed = SpeedConfig("cuda", "auto", 4, loader, 2, compile=False, graph=True, recompute=recompute)
    train(tiny_config(data, tmp_path / "whole", speed=speed))
    train(tiny_config(data, tmp_path / "parts", speed=speed, stop_after_steps=10))
    resume(tmp_path / "parts")
    train(tiny_config(data, tmp_path / "plain", speed=replace(speed, graph=False, recompute=False)))
    losses = {name: [line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "parts", "plain")}
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-3)
    assert losses["plain"] == pytest.approx(losses["whole"], rel=1e-3)
    if not recompute:
        assert "could not be captured" not in (tmp_path / "whole" / "log.txt").read_text()


@needs_gpu
def test_batches_made_beside_the_step_are_the_same():
    def make():
        generator = torch.Generator(GPU).manual_seed(0)
        for number in range(12):
            images = torch.randn(32, 3, 224, 224, device=GPU, generator=generator)
            yield [(images * (number + 1), make_batches(number, 1)[0][1])]

    def consume(batches):
        sums = []
        for ((images, masks),) in batches:
            # Work that is still running when the next batch is made, and memory that is freed and asked for again.
            busy = images.flatten(1) @ images.flatten(1).T
            for _ in range(20):
                busy = busy @ busy / busy.norm()
            sums.append((images.double().sum() + 0 * busy.sum(), masks.context.sum()))
            del images, busy
        return [(one.item(), other.item()) for one, other in sums]

    expected = consume(make())
    assert len({one for one, _ in expected}) == 12
    moved = ([(i, type(m)(m.context.to(GPU), m.targets.to(GPU))) for i, m in batch] for batch in make())
    assert consume(prefetched(moved, GPU)) == expected
