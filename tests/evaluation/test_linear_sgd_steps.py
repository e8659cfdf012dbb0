"""Linear heads by SGD: what they compute, and each of their steps against the same head's alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_trainings import ALONE, NOWHERE, PRECONDITIONED, QUICK, SPEED
from torch import nn

from stop_mim.evaluation.features import pooled_features
from stop_mim.evaluation.linear_heads import LinearHeads
from stop_mim.evaluation.linear_sgd import LinearRun, LinearSGDConfig, heads_for, lr_factor


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


def test_features_are_those_of_some_images_at_a_time(encoder, sets):
    parts, whole = (
        LinearRun(encoder, sets[0], QUICK, ALONE, replace(SPEED, batch_size_per_device=size)) for size in (7, 64)
    )
    images = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(parts.features(images), whole.features(images))
    torch.testing.assert_close(parts.features(images), encoder.embed(images, 2).detach())
