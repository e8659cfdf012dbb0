"""Linear heads by SGD: how good they are, what chooses among them, each of their steps, and resuming."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from small_trainings import (
    CONDITIONS,
    CPU,
    NEWTON,
    SPEED,
    WHOLE,
    Killed,
    coloured,
    kill_at,
    make_task,
    scores_of,
    signal_at,
    small_encoder,
)
from torch import nn

from stop_mim.data.augment import normalise
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.evaluation.linear_heads import LinearTraining, held_out_images, lr_factor
from stop_mim.evaluation.protocols import PROTOCOLS, Protocol
from stop_mim.evaluation.tasks.linear_sgd import LinearSGDOptions
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks

KINDS = ["last1", "last1/batch_norm", "last2", "last2/batch_norm"]


def embed(encoder, pixels):
    """Features of the last two layers."""
    return encoder.embed(normalise(pixels, encoder.mean, encoder.std), 2).detach()


def scores(encoder, sets, protocol=WHOLE, **options):
    return scores_of(make_task("linear-sgd", encoder, *sets, protocol, **{"batch_size": 32, **options}))


def training(encoder, train, protocol=WHOLE, batch_size=32, conditions=CONDITIONS):
    return LinearTraining(encoder, train, batch_size, replace(conditions, protocol=protocol))


@pytest.mark.parametrize("protocol", [replace(WHOLE, epochs=16, milestones=(8, 12)), NEWTON], ids=["SGD", "Newton"])
def test_heads_are_about_as_good_as_logistic_regression(encoder, sets, protocol):
    features = [embed(encoder, data.source.pixels).numpy() for data in sets]
    reference = LogisticRegression(C=1e3, max_iter=5000).fit(features[0], sets[0].labels)
    expected = 100 * reference.score(features[1], sets[1].labels)
    assert 60 < expected < 97  # There is something to get wrong.
    found = scores(encoder, sets, protocol)
    for kind in KINDS:
        assert found[f"{kind}/top1"] > expected - 7


def test_the_learning_rate_follows_the_protocol():
    epochs = (0, 7.999, 8, 15.999, 16, 23.999, 24, 27.999)
    factors = [lr_factor(PROTOCOLS["imagenet"], epoch) for epoch in epochs]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    # VISSL's cosine from 0.01 to 1e-4 over 50 epochs, as its formula gives it at the start of epochs 0, 25 and 49.
    clevr = [(0.0001 + 0.0099 * (1 + math.cos(math.pi * epoch / 50)) / 2) / 0.01 for epoch in (0, 0, 25, 49, 49)]
    epochs = (0, 0.999, 25.5, 49, 49.999)
    assert [lr_factor(PROTOCOLS["clevr-count"], epoch) for epoch in epochs] == pytest.approx(clevr)
    assert lr_factor(PROTOCOLS["generic"], 27.999) < 1e-6


def test_options_replace_the_protocols_values(encoder, sets):
    task = make_task("linear-sgd", encoder, *sets, PROTOCOLS["imagenet"], epochs=14, batch_size=64, lrs=(0.1, 1.0))
    settings = task.settings()
    assert (settings["epochs"], settings["milestones"], settings["lrs"]) == (14, (4, 8, 12), (0.1, 1.0))
    assert (settings["name"], settings["batch_size"], settings["weight_decay"]) == ("imagenet", 64, 5e-4)
    assert PROTOCOLS["imagenet"].shortened(1).milestones == ()


def test_names_tell_the_heads_and_what_was_chosen(encoder, sets):
    metrics, lrs = ["held_out_top1", "top1", "top5"], (0.5, 0.03)
    train, test = sets
    # With six classes; of five or fewer, top5 would say nothing.
    train = LabelledSet(train.source, np.concatenate([[5, 5], train.labels[2:]]), train.indices)
    task = make_task(
        "linear-sgd", encoder, train, test, replace(WHOLE, epochs=1, milestones=(), lrs=lrs), batch_size=32
    )
    records = [*task.run()]
    found = {score.name: score.value for score in records}
    expected = [f"{kind}/lr={lr:g}/{metric}" for kind in KINDS for lr in lrs for metric in metrics]
    expected += [f"{kind}/{metric}" for kind in KINDS for metric in ["lr", *metrics]]
    assert [*found] == [*expected, "layers", "batch_norm", "lr", *metrics]
    assert [score.name for score in records if score.headline] == ["top1"]
    for kind in KINDS:
        held_out = {lr: found[f"{kind}/lr={lr:g}/held_out_top1"] for lr in lrs}
        assert held_out[found[f"{kind}/lr"]] == max(held_out.values()) == found[f"{kind}/held_out_top1"]
    best = f"last{found['layers']:.0f}{'/batch_norm' if found['batch_norm'] else ''}/lr={found['lr']:g}"
    assert all(found[metric] == found[f"{best}/{metric}"] for metric in metrics)
    assert found["top1"] < found["top5"]


def test_few_images_give_a_larger_part_to_choose_by():
    sizes = (100, 500, 1_200, 12_500, 50_000, 100_000, 1_281_167)
    assert [held_out_images(size) for size in sizes] == [50, 200, 240, 2_500, 2_500, 5_000, 10_000]


def test_held_out_images_choose_even_if_the_test_set_would_not(encoder, sets):
    train, test = sets
    # Where every test label is wrong, the head that has learned most is the worst of all.
    wrong = LabelledSet(test.source, (test.labels + 1) % 4, test.indices)
    protocol = replace(WHOLE, epochs=3, milestones=(2,), lrs=(1e-9, 0.5))
    found = scores(encoder, (train, wrong), protocol)
    assert found["lr"] == 0.5
    assert found["held_out_top1"] > 60
    heads = [value for name, value in found.items() if "lr=" in name and name.endswith("/top1")]
    assert max(heads) > found["top1"] + 5
    honest = scores(encoder, sets, protocol)
    assert all(found[name] == value for name, value in honest.items() if "held_out" in name)


def test_the_heads_do_not_learn_from_what_chooses_among_them(encoder, tmp_path):
    train = coloured(100, together=False)
    run = training(encoder, train, conditions=replace(CONDITIONS, speed=DeviceConfig(workers=0, loader="streaming")))
    run.train(tmp_path / "state")
    assert len(run.held_out) == 50
    assert sorted({*train.source.reads}) == sorted(run.used.indices)
    assert not {*run.used.indices} & {*run.held_out.indices}


def test_several_learning_rates_at_once_change_none_of_the_others(encoder, sets):
    alone = scores(encoder, sets)
    # One of them explodes, and is not chosen.
    grid = scores(encoder, sets, replace(WHOLE, lrs=(1e30, 0.5)))
    for kind in KINDS:
        for metric in ("held_out_top1", "top1"):
            assert grid[f"{kind}/lr=0.5/{metric}"] == alone[f"{kind}/{metric}"]
    assert grid["last2/lr=1e+30/top1"] == 0
    assert grid["lr"] == 0.5


def test_the_encoder_stays_as_it_is_and_the_global_generator_too(sets):
    encoder = small_encoder().train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    modes = []
    encoder.vit.norm.register_forward_hook(lambda module, *_: modes.append(module.training))
    state = torch.get_rng_state()
    scores(encoder, sets, replace(WHOLE, epochs=1, milestones=()))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(modes)
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_an_encoder_that_gives_no_numbers_is_refused(sets):
    encoder = small_encoder()
    encoder.vit.norm.weight.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match=r"step 1: lower linear_sgd.lrs \(\(0.5,\)\)"):
        scores(encoder, sets)
    with pytest.raises(TrainingDiverged, match="not finite"):
        scores(encoder, sets, NEWTON)


def test_options_that_cannot_work_are_refused_by_name(encoder, sets):
    with pytest.raises(InputError, match="batch_size is 33: it must be a multiple of 2"):
        training(encoder, sets[0], batch_size=33, conditions=replace(CONDITIONS, ranks=Ranks(0, 2, 2, CPU)))
    with pytest.raises(InputError, match=r"linear_sgd\.lrs is"):
        LinearSGDOptions(lrs=(0.1, 0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_on_the_gpu(sets, loader):
    ranks = Ranks(0, 1, 1, torch.device("cuda"))
    speed = DeviceConfig(workers=2, loader=loader)
    assert scores(small_encoder(), sets, speed=speed, ranks=ranks)["top1"] > 60


# Steps


def inputs_of(head, features):
    inputs = features[:, -64 * head.layers :]
    return nn.functional.batch_norm(inputs, None, None, training=True) if head.batch_norm else inputs


def test_a_step_is_that_of_each_head_alone(encoder, sets):
    run = training(encoder, sets[0], replace(WHOLE, lrs=(0.5, 0.03)))
    pixels, labels = sets[0].source.pixels[:32], torch.from_numpy(sets[0].labels[:32])
    features = embed(encoder, pixels)
    before = [(linear.weight.detach().clone(), linear.bias.detach().clone()) for linear in run.heads.linears]
    run.heads.train()
    images = (pixels / 255 - torch.tensor(encoder.mean)[:, None, None]) / torch.tensor(encoder.std)[:, None, None]
    # 200 of the images are learned from, in seven steps an epoch; the milestones are 2 and 3.
    assert [run.lr(step) for step in (0, 13, 14, 21)] == pytest.approx([1, 1, 0.1, 0.01])
    assert run.update(images, labels, run.lr(0), seed=0)[2] == 1
    for number, head in enumerate(run.heads.heads):
        # VISSL's heads: a linear layer with weight decay, after a BatchNorm with scale and shift and without decay.
        linear = nn.Linear(64 * head.layers, 4)
        linear.weight.data, linear.bias.data = before[number]
        norm = nn.BatchNorm1d(64 * head.layers) if head.batch_norm else nn.Identity()
        nn.functional.cross_entropy(linear(norm(features[:, -64 * head.layers :])), labels).backward()
        groups = [{"params": [*linear.parameters()], "weight_decay": 5e-4}, {"params": [*norm.parameters()]}]
        torch.optim.SGD(groups[: 1 + head.batch_norm], head.lr * 32 / 256, 0.9, nesterov=True).step()
        trained = run.heads.linears[number], run.heads.affines[number]
        for ours, theirs in zip(trained, (linear, norm), strict=True):
            expected = theirs.state_dict()
            for name, tensor in ours.state_dict().items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


def test_a_preconditioned_step_is_that_of_newton_in_the_features_of_the_head(encoder, sets, tmp_path):
    run = training(encoder, sets[0], replace(NEWTON, weight_decay=0.01), batch_size=200)
    taken = []

    def look(optimiser, *_):
        if not taken:
            taken.extend(linear.weight.grad.clone() for linear in run.heads.linears)

    run.optimiser.register_step_pre_hook(look)
    before = [linear.weight.detach().clone() for linear in run.heads.linears]
    run.train(tmp_path / "state")
    features = embed(encoder, run.used.source.pixels[run.used.indices])
    labels = torch.from_numpy(run.used.classes)
    for number, head in enumerate(run.heads.heads):
        extended = nn.functional.pad(inputs_of(head, features).double(), (0, 1), value=1.0)
        weights = nn.functional.pad(before[number].double(), (0, 1)).requires_grad_()
        loss = nn.functional.cross_entropy(extended @ weights.T, labels) + 0.01 / 2 * weights.square().sum()
        loss.backward()
        curvature = 3 / 16 * extended.T @ extended / len(labels) + 0.01 * torch.eye(extended.shape[1])
        expected = torch.linalg.solve(curvature, weights.grad.T).T[:, :-1]
        assert (taken[number] - expected).norm() / expected.norm() < 0.02
    # They are standardised by the training set, not by the batch.
    torch.testing.assert_close(run.heads.norm.running_mean, features.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.heads.norm.running_var, features.var(0, unbiased=False), atol=1e-5, rtol=1e-3)
    assert not run.heads.norm.training


def test_accuracies_are_of_the_images_that_can_be_read(encoder, sets):
    # Grey images, whose brightness is their class.
    levels = torch.arange(12).repeat(10)
    pixels = (levels * 20).to(torch.uint8)[:, None, None, None].repeat(1, 3, 16, 16)
    source = type(sets[0].source)(pixels, bad=(13,), together=False)
    data = LabelledSet(source, levels.numpy(), np.arange(120))
    run = training(encoder, sets[0], conditions=replace(CONDITIONS, speed=replace(SPEED, batch_size_per_device=7)))

    def predict(images):
        grey = (images[:, 0, 0, 0] * encoder.std[0] + encoder.mean[0]) * 255 / 20
        near = -(grey[:, None] - torch.arange(12)).abs()
        # The class is first, last, second at best, or unknown.
        second = near - 2 * torch.nn.functional.one_hot(grey.round().long(), 12) + 0.5 * (torch.arange(12) == 0)
        return torch.stack([near, -near, second, torch.full_like(near, torch.nan)])

    run.predict = predict
    found, images = run.score(data)
    assert images == 119, "one cannot be read"
    assert found == [[100, 100], [0, 0], [0, 100], [0, 0]]


# Resuming


def state_files():
    return [*(Path(os.environ["STOP_MIM_CACHE"]) / "evaluations").glob("*")]


@pytest.mark.parametrize(("loader", "preconditioned"), [("resident", False), ("streaming", True)])
def test_a_resumed_run_is_bit_identical(encoder, tmp_path, loader, preconditioned):
    train = coloured(180, together=False)
    protocol = Protocol("cosine", 4, final_factor=0.01, lrs=(0.5, 0.1), preconditioned=preconditioned)

    def run(name, progress=None):
        conditions = replace(CONDITIONS, speed=replace(SPEED, loader=loader))
        training(encoder, train, protocol, conditions=conditions).train(tmp_path / name, progress)
        return read_checkpoint(tmp_path / name)

    whole = run("whole")
    with pytest.raises(Killed):
        run("parts", kill_at(8))
    assert read_checkpoint(tmp_path / "parts").step == 6, "every epoch, of three steps, is saved"
    with pytest.raises(KeyboardInterrupt):
        run("parts", signal_at(9, signal.SIGINT))
    assert read_checkpoint(tmp_path / "parts").step == 10, "a signal saves the step"
    parts = run("parts")
    assert whole.step == parts.step == 12
    assert whole.tensors.keys() == parts.tensors.keys()
    assert any(name.startswith("optimiser.momentum_buffer") for name in whole.tensors)
    assert all(torch.equal(whole.tensors[name], parts.tensors[name]) for name in whole.tensors)
    run("whole", kill_at(1))  # A finished one is not trained again.


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_resumed_run_knows_the_images_that_could_not_be_read(encoder, tmp_path, monkeypatch, loader):
    monkeypatch.setattr("stop_mim.data.image_source.MAX_BAD_FRACTION", 0.5)
    train = coloured(180, together=False, bad=(13, 100))

    def run(progress=None):
        made = training(encoder, train, conditions=replace(CONDITIONS, speed=replace(SPEED, loader=loader)))
        made.train(tmp_path / "state", progress)
        for images in (made.held_out, train.part(np.arange(90, 180))):
            made.score(images)
        return made.unreadable

    with pytest.raises(Killed):
        run(kill_at(8))
    assert run() == run() == {train.source: {13, 100}}, "also where nothing is left to train"


def test_the_task_resumes_from_its_own_state_until_it_has_finished(encoder, sets):
    told = []
    make = lambda **options: make_task("linear-sgd", encoder, *sets, batch_size=32, **options)  # noqa: E731
    task = make(progress=lambda done, total: told.append((done, total)))
    whole = scores_of(task)
    assert told == [(step, 28) for step in range(29)]
    assert state_files()
    task.finish()
    assert not state_files()
    with pytest.raises(Killed):
        scores_of(make(progress=kill_at(16)))
    (state,) = state_files()
    for others in ({"seed": 1}, {"lrs": (0.1,)}, {"protocol": replace(WHOLE, weight_decay=0.1)}):
        other = make(**others)
        scores_of(other)
        other.finish()
        assert state_files() == [state], "another evaluation has a state of its own"
    told.clear()
    resumed = make(progress=lambda done, total: told.append((done, total)))
    assert scores_of(resumed) == whole
    assert told[0] == (14, 28)
    resumed.finish()
    with pytest.raises(Killed):
        scores_of(make(progress=kill_at(16)))
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=rf"{state.name}.*delete it"):
        scores_of(make())
