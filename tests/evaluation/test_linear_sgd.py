"""Linear heads by SGD: what they compute, how fast they learn, what chooses among them, and that they can be resumed."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.images import BadImage
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.features import pooled_features
from stop_mim.evaluation.labelled_training import StateFile, accuracies, check_sets
from stop_mim.evaluation.linear_heads import Head, LinearHeads
from stop_mim.evaluation.linear_sgd import (
    LinearRun,
    LinearSGDConfig,
    config_for,
    heads_for,
    linear_sgd,
    lr_factor,
)
from stop_mim.evaluation.protocols import PROTOCOLS
from stop_mim.models.encoder import Dimensions, Encoder, create_encoder
from stop_mim.models.hub_encoder import HubEncoder
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.loop import TrainingDiverged

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 1, CPU)
NOWHERE = StateFile(None, {}, ALONE)
QUICK = LinearSGDConfig(
    epochs=4,
    batch_size=32,
    lrs=(0.5,),
    milestones=(2, 3),
    train_view="resize_flip",
    test_view="resize",
    held_out_part=0.2,
)
PRECONDITIONED = replace(QUICK, preconditioned=True, schedule="cosine", final_factor=0.0, lrs=(0.1,), weight_decay=1e-5)
SPEED = SpeedConfig(workers=0)


class InMemory(ImageSource):
    """Decoded images; without `together` they are read one by one, and bad ones cannot be."""

    def __init__(self, pixels, bad=(), together=True):
        super().__init__("toy")
        self.pixels, self.bad, self.together, self.reads = pixels, set(bad), together, []

    def __len__(self):
        return len(self.pixels)

    def read(self, index):
        self.reads.append(index)
        if index in self.bad:
            raise BadImage(self.describe(index), "torn")
        return self.pixels[index]

    def size(self, index):
        return tuple(self.pixels.shape[-2:])

    def describe(self, index):
        return f"image {index}"

    def fingerprint(self):
        return digest([self.pixels.numpy().tobytes()])

    def stacked(self):
        return self.pixels if self.together else None


def coloured(count, classes=4, noise=22, seed=0, **options):
    """A colour for each class, which neighbouring classes share in part, with a grain."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % classes)
    colours = np.random.default_rng(9).integers(60, 196, (classes, 3))
    pixels = colours[labels][:, :, None, None] + random.normal(0, noise, (count, 3, 1, 1))
    pixels = pixels + random.normal(0, 20, (count, 3, 16, 16))
    source = InMemory(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), **options)
    return LabelledSet(source, labels, np.arange(count))


def small_encoder(depth=2, width=64, seed=0):
    torch.manual_seed(seed)
    return create_encoder(Dimensions(width, depth, 2), 16, 8).eval()


@pytest.fixture(scope="module")
def encoder():
    return small_encoder()


@pytest.fixture(scope="module")
def sets():
    return coloured(400), coloured(200, seed=1)


def test_heads_are_about_as_good_as_logistic_regression(encoder, sets):
    train, test = sets
    results = dict(linear_sgd(encoder, train, test, replace(QUICK, epochs=16, milestones=(8, 12)), speed=SPEED))
    features = [pooled_features(encoder, data.source.pixels, 2).numpy() for data in sets]
    reference = LogisticRegression(C=1e3, max_iter=5000).fit(features[0], train.labels)
    expected = 100 * reference.score(features[1], test.labels)
    assert 60 < expected < 97  # There is something to get wrong.
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        assert results[f"linear_sgd/{head}/top1"] > expected - 7
        assert results[f"linear_sgd/{head}/top5"] == 100  # There are four classes.
    assert results["linear_sgd/top1"] > expected - 5


def test_preconditioned_heads_are_logistic_regression_after_forty_steps(encoder, sets):
    train, test = sets
    features = [pooled_features(encoder, data.source.pixels, 2).numpy() for data in sets]
    reference = LogisticRegression(C=1e3, max_iter=5000).fit(features[0], train.labels)
    expected = 100 * reference.score(features[1], test.labels)
    ours = dict(linear_sgd(encoder, *sets, PRECONDITIONED, speed=SPEED))
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        assert ours[f"linear_sgd/{head}/top1"] == pytest.approx(expected, abs=5)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_is_what_the_heads_are_trained_by(name):
    protocol = PROTOCOLS[name]
    config = config_for(protocol, seed=3)
    assert (config.epochs, config.batch_size, config.lrs, config.seed) == (protocol.epochs, 256, protocol.lrs, 3)
    assert (config.momentum, config.weight_decay) == (protocol.momentum, protocol.weight_decay)
    assert (config.train_view, config.test_view) == (protocol.train_view, protocol.test_view)
    assert config.preconditioned == (name == "generic")
    if protocol.cosine_final_lr is None:
        assert (config.schedule, config.milestones) == ("milestones", protocol.lr_milestones)
    else:
        assert config.schedule == "cosine"
        assert protocol.lr * lr_factor(config, config.epochs) == pytest.approx(protocol.cosine_final_lr)


def test_what_is_asked_for_takes_the_place_of_the_protocols():
    config = config_for(PROTOCOLS["imagenet"], epochs=14, batch_size=64, lrs=(0.1, 1.0))
    assert (config.epochs, config.batch_size, config.lrs, config.milestones) == (14, 64, (0.1, 1.0), (4, 8, 12))
    assert config_for(PROTOCOLS["imagenet"], epochs=1).milestones == ()


def test_names_tell_the_heads_and_what_was_chosen(encoder, sets):
    heads = ["last1", "last1+bn", "last2", "last2+bn"]
    for lrs in ((0.5,), (0.5, 0.03)):
        results = dict(linear_sgd(encoder, *sets, replace(QUICK, epochs=1, lrs=lrs), speed=SPEED))
        names = heads if len(lrs) == 1 else [f"{head}@{lr:g}" for head in heads for lr in lrs]
        chosen = ["layers", "batch_norm", "lr", "held_out_top1", "top1", "top5"]
        scores = [f"{name}/{score}" for name in names for score in ("held_out_top1", "top1", "top5")]
        kinds = [f"{head}/{score}" for head in heads for score in ("lr", "held_out_top1", "top1", "top5")]
        kinds = kinds if len(lrs) > 1 else []
        assert [*results] == [f"linear_sgd/{name}" for name in scores + kinds + chosen]
        for head in heads if len(lrs) > 1 else ():
            lr = results[f"linear_sgd/{head}/lr"]
            held_out = {one: results[f"linear_sgd/{head}@{one:g}/held_out_top1"] for one in lrs}
            assert held_out[lr] == max(held_out.values()) == results[f"linear_sgd/{head}/held_out_top1"]
            assert results[f"linear_sgd/{head}/top1"] == results[f"linear_sgd/{head}@{lr:g}/top1"]
        best = f"last{results['linear_sgd/layers']:.0f}{'+bn' if results['linear_sgd/batch_norm'] else ''}"
        best += f"@{results['linear_sgd/lr']:g}" if len(lrs) > 1 else ""
        for score in ("held_out_top1", "top1", "top5"):
            assert results[f"linear_sgd/{score}"] == results[f"linear_sgd/{best}/{score}"]


def test_the_heads_are_the_last_layer_and_the_last_four_or_all_there_are():
    config = LinearSGDConfig()
    assert [head.name() for head in heads_for(config, 12)] == ["last1", "last1+bn", "last4", "last4+bn"]
    assert [head.name() for head in heads_for(config, 3)] == ["last1", "last1+bn", "last3", "last3+bn"]
    assert [head.name() for head in heads_for(config, 1)] == ["last1", "last1+bn"]
    grid = heads_for(replace(config, lrs=(0.01, 0.1)), 12)
    assert [head.name(with_lr=True) for head in grid][-2:] == ["last4+bn@0.01", "last4+bn@0.1"]


def test_logits_are_a_linear_map_of_the_last_columns_standardised_or_not():
    heads = LinearHeads(heads_for(LinearSGDConfig(), 12), 3, 5, ALONE)
    generator = torch.Generator().manual_seed(0)
    for features in torch.randn(4, 50, 12, generator=generator) * 3 + 1:
        heads.train()
        logits = heads.logits(features)
        assert logits.shape == (4, 50, 5)
        standardised = (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-5).sqrt()
        for number, inputs in enumerate((features[:, 9:], standardised[:, 9:], features, standardised)):
            linear = heads.linears[number]
            torch.testing.assert_close(logits[number], inputs @ linear.weight.T + linear.bias)
    heads.eval()
    alone = heads.logits(features[:1])
    torch.testing.assert_close(alone, heads.logits(features)[:, :1])
    running = (features - heads.norm.running_mean) / (heads.norm.running_var + 1e-5).sqrt()
    torch.testing.assert_close(alone[1], running[:1, 9:] @ heads.linears[1].weight.T)
    # The library's own, with its momentum of a tenth, over the same four batches.
    reference = nn.BatchNorm1d(12, affine=False)
    for part in torch.randn(4, 50, 12, generator=torch.Generator().manual_seed(0)) * 3 + 1:
        reference(part)
    assert torch.equal(heads.norm.running_mean, reference.running_mean)
    assert torch.equal(heads.norm.running_var, reference.running_var)
    assert not list(heads.norm.parameters())


def test_a_step_is_that_of_each_head_alone(encoder, sets):
    config = replace(QUICK, epochs=1, lrs=(0.5, 0.03), held_out_part=0.9, flip_probability=0.0)
    run = LinearRun(encoder, sets[0], config, ALONE, SPEED)
    pixels, labels = sets[0].source.pixels[:32], torch.from_numpy(sets[0].labels[:32])
    features = pooled_features(encoder, pixels, 2).clone()
    before = [(linear.weight.detach().clone(), linear.bias.detach().clone()) for linear in run.heads.linears]
    for group in run.optimiser.param_groups:
        group["lr"] = group["peak_lr"]
    run.heads.train()
    images = (pixels / 255 - torch.tensor(encoder.mean)[:, None, None]) / torch.tensor(encoder.std)[:, None, None]
    losses = run._step(images, labels)
    for number, head in enumerate(run.heads.heads):
        inputs = features[:, -64 * head.layers :]
        inputs = nn.functional.batch_norm(inputs, None, None, training=True) if head.batch_norm else inputs
        weight, bias = (nn.Parameter(value) for value in before[number])
        loss = nn.functional.cross_entropy(inputs @ weight.T + bias, labels)
        loss.backward()
        optimiser = torch.optim.SGD([weight, bias], head.lr * 32 / 256, 0.9, weight_decay=5e-4, nesterov=True)
        optimiser.step()
        torch.testing.assert_close(losses[number], loss.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(run.heads.linears[number].weight, weight, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(run.heads.linears[number].bias, bias, atol=1e-5, rtol=1e-4)


def test_a_preconditioned_step_is_that_of_newton_in_the_features_of_the_head(encoder, sets):
    config = replace(PRECONDITIONED, batch_size=320, flip_probability=0.0, weight_decay=0.01)
    run = LinearRun(encoder, sets[0], config, ALONE, SPEED)
    taken = []

    def look(optimiser, *_):
        if not taken:
            taken.extend(linear.weight.grad.clone() for linear in run.heads.linears)

    run.optimiser.register_step_pre_hook(look)
    before = [linear.weight.detach().clone() for linear in run.heads.linears]
    run.train(NOWHERE, None)
    features = pooled_features(encoder, run.used.source.pixels[run.used.indices], 2).clone()
    labels = torch.from_numpy(run.used.classes)
    for number, head in enumerate(run.heads.heads):
        inputs = features[:, -64 * head.layers :]
        inputs = nn.functional.batch_norm(inputs, None, None, training=True) if head.batch_norm else inputs
        extended = nn.functional.pad(inputs.double(), (0, 1), value=1.0)
        weights = nn.functional.pad(before[number].double(), (0, 1)).requires_grad_()
        loss = nn.functional.cross_entropy(extended @ weights.T, labels) + 0.01 / 2 * weights.square().sum()
        loss.backward()
        curvature = 3 / 16 * extended.T @ extended / len(labels) + 0.01 * torch.eye(extended.shape[1])
        expected = torch.linalg.solve(curvature, weights.grad.T).T[:, :-1]
        difference = (taken[number] - expected).norm() / expected.norm()
        assert difference < 0.02


def test_preconditioned_heads_are_standardised_by_the_training_set_and_not_by_the_batch(encoder, sets):
    run = LinearRun(encoder, sets[0], replace(PRECONDITIONED, flip_probability=0.0), ALONE, SPEED)
    run.train(NOWHERE, None)
    features = pooled_features(encoder, run.used.source.pixels[run.used.indices], 2)
    torch.testing.assert_close(run.heads.norm.running_mean, features.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.heads.norm.running_var, features.var(0, unbiased=False), atol=1e-5, rtol=1e-3)
    assert not run.heads.norm.training
    assert run.heads.linears[0].training


def test_the_learning_rate_falls_exactly_at_the_milestones():
    config = LinearSGDConfig()
    epochs = (0, 7.999, 8, 15.999, 16, 23.999, 24, 27.999)
    assert [lr_factor(config, epoch) for epoch in epochs] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    smooth = LinearSGDConfig(epochs=50, schedule="cosine")
    assert [lr_factor(smooth, epoch) for epoch in (0, 25, 50)] == pytest.approx([1, 0.505, 0.01])


def test_the_optimiser_gets_the_learning_rate_of_the_schedule_scaled_with_the_batch(encoder, sets):
    run = LinearRun(encoder, sets[0], replace(QUICK, epochs=3, lrs=(0.5, 0.1), milestones=(1,)), ALONE, SPEED)
    seen = []
    run.optimiser.register_step_post_hook(
        lambda optimiser, *_: seen.append([group["lr"] for group in optimiser.param_groups[:2]])
    )
    run.train(NOWHERE, None)
    # 320 images are learned from: ten steps an epoch.
    peaks = [0.5 * 32 / 256, 0.1 * 32 / 256]
    assert np.allclose(seen, [peaks] * 10 + [[0.1 * peak for peak in peaks]] * 20)


def test_held_out_images_choose_even_if_the_test_set_would_not(encoder, sets):
    train, test = sets
    # Where every test label is wrong, the head that has learned most is the worst of all.
    wrong = LabelledSet(test.source, (test.labels + 1) % 4, test.indices)
    config = replace(QUICK, epochs=3, lrs=(1e-9, 0.5))
    results = dict(linear_sgd(encoder, train, wrong, config, speed=SPEED))
    assert results["linear_sgd/lr"] == 0.5
    assert results["linear_sgd/held_out_top1"] > 60
    heads = [value for name, value in results.items() if name.endswith("/top1") and name.count("/") == 2]
    assert max(heads) > results["linear_sgd/top1"] + 5
    honest = dict(linear_sgd(encoder, train, test, config, speed=SPEED))
    ours = {name: value for name, value in honest.items() if "held_out" in name}
    assert ours == {name: value for name, value in results.items() if "held_out" in name}


def test_the_heads_do_not_learn_from_what_chooses_among_them(encoder):
    train = coloured(100, together=False)
    run = LinearRun(encoder, train, replace(QUICK, epochs=2), ALONE, replace(SPEED, loader="streaming"))
    run.train(NOWHERE, None)
    assert len(run.held_out) == 20
    assert sorted({*train.source.reads}) == sorted(run.used.indices)
    assert not {*run.used.indices} & {*run.held_out.indices}


def test_several_learning_rates_at_once_change_none_of_the_others(encoder, sets):
    alone = dict(linear_sgd(encoder, *sets, QUICK, speed=SPEED))
    # One of them explodes, and is not chosen.
    grid = dict(linear_sgd(encoder, *sets, replace(QUICK, lrs=(1e30, 0.5)), speed=SPEED))
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        for score in ("held_out_top1", "top1", "top5"):
            assert grid[f"linear_sgd/{head}@0.5/{score}"] == alone[f"linear_sgd/{head}/{score}"]
    assert grid["linear_sgd/last2@1e+30/top1"] == grid["linear_sgd/last2@1e+30/top5"] == 0
    assert grid["linear_sgd/lr"] == 0.5


class Interrupted(KeyboardInterrupt):
    pass


def interrupt_at(step):
    def progress(done, total):
        if done == step:
            raise Interrupted

    return progress


@pytest.mark.parametrize(("loader", "preconditioned"), [("resident", False), ("streaming", False), ("streaming", True)])
def test_a_resumed_run_is_bit_identical(encoder, tmp_path, loader, preconditioned):
    train, test = coloured(90, together=False), coloured(40, seed=1)
    config = replace(QUICK, schedule="cosine", train_view="random_resized_crop", lrs=(0.5, 0.1))
    config = replace(config, preconditioned=preconditioned)
    speed = replace(SPEED, loader=loader)
    whole = list(linear_sgd(encoder, train, test, config, speed=speed, state_file=tmp_path / "whole"))
    for step in (8, 11):  # In the third and in the fourth epoch, of three steps each.
        with pytest.raises(Interrupted):
            list(
                linear_sgd(
                    encoder,
                    train,
                    test,
                    config,
                    progress=interrupt_at(step),
                    speed=speed,
                    state_file=tmp_path / "parts",
                )
            )
        assert read_checkpoint(tmp_path / "parts").step == (step - 1) // 3
    parts = list(linear_sgd(encoder, train, test, config, speed=speed, state_file=tmp_path / "parts"))
    assert parts == whole
    one, other = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one.step == other.step == 4
    assert one.tensors.keys() == other.tensors.keys()
    assert any(name.startswith("optimiser.momentum_buffer") for name in one.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_finished_run_is_only_scored_again(encoder, sets, tmp_path):
    state, told = tmp_path / "state", []
    first = list(linear_sgd(encoder, *sets, replace(QUICK, epochs=1), speed=SPEED, state_file=state))
    again = linear_sgd(
        encoder,
        *sets,
        replace(QUICK, epochs=1),
        progress=lambda done, total: told.append(done),
        speed=SPEED,
        state_file=state,
    )
    assert list(again) == first
    assert not told


def test_a_state_of_another_evaluation_or_a_damaged_one_is_refused(encoder, sets, tmp_path):
    state = tmp_path / "state"
    config = replace(QUICK, epochs=1)
    list(linear_sgd(encoder, *sets, config, speed=SPEED, state_file=state))
    saved = state.read_bytes()
    larger = small_encoder()
    larger.image_size = (32, 32)
    others = [
        ((encoder, *sets, replace(config, weight_decay=0.1)), r"its weight_decay is 0.0005, not 0.1\): delete it"),
        ((small_encoder(seed=1), *sets, config), "its encoder is"),
        ((larger, *sets, config), r"its image_size is \[16, 16\], not \[32, 32\]"),
        ((encoder, sets[1], sets[1], config), "its images is"),
    ]
    for arguments, message in others:
        with pytest.raises(InputError, match=message):
            list(linear_sgd(*arguments, speed=SPEED, state_file=state))
    assert state.read_bytes() == saved
    state.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    with pytest.raises(InputError, match=r"holds no state to go on from \(.*checksum.*\): delete it to begin anew"):
        list(linear_sgd(encoder, *sets, config, speed=SPEED, state_file=state))


def test_progress_counts_all_steps(encoder, sets):
    told = []
    list(linear_sgd(encoder, *sets, QUICK, progress=lambda done, total: told.append((done, total)), speed=SPEED))
    assert told == [(step, 40) for step in range(1, 41)]


def test_the_encoder_stays_as_it_is_and_the_global_generator_too(sets):
    encoder = small_encoder().train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    modes = []
    encoder.vit.norm.register_forward_hook(lambda module, *_: modes.append(module.training))
    state = torch.get_rng_state()
    list(linear_sgd(encoder, *sets, replace(QUICK, epochs=1), speed=SPEED))
    assert torch.equal(torch.get_rng_state(), state)
    assert encoder.training
    assert not any(modes)
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_features_are_those_of_some_images_at_a_time(encoder, sets):
    parts, whole = (
        LinearRun(encoder, sets[0], QUICK, ALONE, replace(SPEED, batch_size_per_device=size)) for size in (7, 64)
    )
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(parts.features(images), whole.features(images))
    torch.testing.assert_close(parts.features(images), encoder.embed(images, 2).detach())


@pytest.mark.parametrize("together", [True, False])
def test_accuracies_are_of_the_images_that_can_be_read(encoder, together):
    # Grey images, whose brightness is their class; the prediction is off by one for classes above 11.
    levels = torch.arange(12).repeat(10)
    pixels = (levels * 20).to(torch.uint8)[:, None, None, None].repeat(1, 3, 16, 16)
    bad = () if together else (13,)
    data = LabelledSet(InMemory(pixels, bad, together), levels.numpy(), np.arange(120))

    def predict(images):
        grey = (images[:, 0, 0, 0] * encoder.std[0] + encoder.mean[0]) * 255 / 20
        near = -(grey[:, None] - torch.arange(12)).abs()
        later = -(grey[:, None] - torch.arange(12) - 3.1).abs()  # The class is fourth or, at the border, later.
        broken = torch.full_like(near, torch.nan)
        return torch.stack([near, -near, later, broken])

    scores = accuracies(predict, 4, data, encoder, "resize", ALONE, replace(SPEED, batch_size_per_device=7))
    count = len(data) - len(bad)
    expected = []
    for offset in (-3.1, None):
        order = [sorted(range(12), key=lambda c, level=level: abs(level - c + (offset or 0))) for level in range(12)]
        places = [order[level].index(level) for index, level in enumerate(levels.tolist()) if index not in bad]
        expected.append([100 * sum(place < top for place in places) / count for top in (1, 5)])
    assert scores[2].tolist() == pytest.approx(expected[0], rel=1e-5)
    assert scores[0].tolist() == pytest.approx(expected[1]) == [100, 100]
    assert scores[1].tolist() == [0, 0]
    assert scores[3].tolist() == [0, 0]


def test_bad_training_images_are_left_out(encoder):
    train, test = coloured(400, together=False, bad=(5, 100)), coloured(40, seed=1)
    for loader in ("resident", "streaming"):
        speed = replace(SPEED, loader=loader)
        results = dict(linear_sgd(encoder, train, test, replace(QUICK, held_out_part=0.05), speed=speed))
        assert results["linear_sgd/top1"] > 60


def test_an_encoder_that_gives_no_numbers_is_told(sets):
    encoder = small_encoder()
    encoder.vit.norm.weight.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="No linear head had a finite loss in epoch 1"):
        list(linear_sgd(encoder, *sets, QUICK, speed=SPEED))
    with pytest.raises(TrainingDiverged, match="features are not finite"):
        list(linear_sgd(encoder, *sets, PRECONDITIONED, speed=SPEED))


def test_sets_that_cannot_be_told_apart_are_refused(sets):
    train, test = sets
    without = train.part(np.flatnonzero(train.labels != 2))
    with pytest.raises(InputError, match="Class 2 of the test set 'toy' has no image in the training set 'toy'"):
        check_sets(without, test)
    with pytest.raises(InputError, match="have class 1: give two classes or more"):
        check_sets(train.part(np.flatnonzero(train.labels == 1)), test)
    check_sets(train, without)


def test_a_batch_that_cannot_be_divided_is_refused(encoder, sets):
    run = LinearRun(encoder, sets[0], replace(QUICK, batch_size=33), ALONE, SPEED)
    run.ranks = Ranks(0, 2, 2, CPU)
    with pytest.raises(InputError, match="batch_size is 33: it must be a multiple of 2"):
        run.train(NOWHERE, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 1),
        ("lrs", ()),
        ("lrs", (0.1, 0.1)),
        ("lrs", (-0.1,)),
        ("lrs", (float("nan"),)),
        ("milestones", (8, 4)),
        ("milestones", (0, 4)),
        ("milestone_factor", 2.0),
        ("final_factor", -0.1),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("layers", 0),
        ("held_out_part", 0.0),
        ("held_out_part", 1.0),
        ("held_out_images", 0),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"linear_sgd.{field} is"):
        replace(LinearSGDConfig(), **{field: value})


@pytest.mark.parametrize("field", ["schedule", "train_view", "test_view"])
def test_a_misspelt_choice_is_refused_by_name(field):
    config = LinearSGDConfig()
    # As it would come from a file: in tests, a call with it is refused by its type before.
    object.__setattr__(config, field, "nonsense")
    with pytest.raises(InputError, match=f"linear_sgd.{field} is nonsense: choose"):
        config.__post_init__()


class HubModel(nn.Module):
    """As transformers' models answer: hidden states of a class token and four patches, before and after one layer."""

    config = SimpleNamespace(hidden_size=3, num_hidden_layers=1, patch_size=8, image_size=16, model_type="vit")

    def __init__(self):
        super().__init__()
        self.layernorm = nn.Linear(3, 3)
        nn.init.eye_(self.layernorm.weight)

    def forward(self, images, output_hidden_states):
        patches = nn.functional.avg_pool2d(images, 8).flatten(2).mT
        tokens = torch.cat([torch.zeros(len(images), 1, 3), patches], 1)
        return SimpleNamespace(hidden_states=(torch.zeros_like(tokens), tokens))


def test_encoders_of_the_hub_are_probed_too(sets):
    results = dict(linear_sgd(HubEncoder(HubModel()), *sets, QUICK, speed=SPEED))
    assert results["linear_sgd/top1"] > 60
    assert "linear_sgd/last1+bn/top1" in results
    assert not any("last2" in name or "last4" in name for name in results)


SCRIPT = """
import sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_linear_sgd import PRECONDITIONED, QUICK, SPEED, coloured, small_encoder
from stop_mim.evaluation.linear_sgd import linear_sgd
from stop_mim.training.distributed import process_group

torch.set_num_threads(1)
config = {"QUICK": QUICK, "PRECONDITIONED": PRECONDITIONED}[sys.argv[3]]
config = replace(config, epochs=2, flip_probability=0.0, held_out_part=0.1)
with process_group("cpu") as ranks:
    results = list(linear_sgd(small_encoder(), coloured(79), coloured(41, seed=1), config, ranks=ranks, speed=SPEED,
                              state_file=Path(sys.argv[2]) / f"state{ranks.world_size}"))
    torch.save(results, Path(sys.argv[2]) / f"results{ranks.world_size}.{ranks.rank}")
"""


def run_processes(script, folder, count, port, *arguments):
    """Run a script in so many processes that know of each other, to its end."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, os.path.dirname(__file__), str(folder), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(("name", "config"), [("QUICK", QUICK), ("PRECONDITIONED", PRECONDITIONED)])
def test_two_processes_learn_what_one_learns(tmp_path, name, config):
    run_processes(SCRIPT, tmp_path, 2, free_port(), name)
    config = replace(config, epochs=2, flip_probability=0.0, held_out_part=0.1)
    # 71 images in batches of 32: the last batch is uneven, 4 images in one process and 3 in the other.
    alone = list(
        linear_sgd(
            small_encoder(), coloured(79), coloured(41, seed=1), config, speed=SPEED, state_file=tmp_path / "state1"
        )
    )
    first, second = (torch.load(tmp_path / f"results2.{rank}", weights_only=True) for rank in (0, 1))
    assert first == second
    assert [name for name, _ in first] == [name for name, _ in alone]
    one, two = (read_checkpoint(tmp_path / f"state{count}").tensors for count in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Running statistics among them: those of all images, not of one process's.
        # Where features hardly vary, preconditioned steps are long, and so are their rounding errors.
        tolerance = 1e-3 * tensor.abs().max().item() if config.preconditioned else 2e-5
        torch.testing.assert_close(two[name], tensor, atol=tolerance, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_on_the_gpu(sets, loader):
    encoder: Encoder = small_encoder().cuda()
    speed = SpeedConfig(workers=2, loader=loader)
    results = dict(linear_sgd(encoder, *sets, QUICK, speed=speed))
    assert results["linear_sgd/top1"] > 60
    assert Head(2, True, 0.5).name() == "last2+bn"
