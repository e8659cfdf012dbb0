"""The online probe: scores that can be believed, of features that it leaves as they are."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from probed_run import NAMES, PROBE, a_probe, learn
from sklearn.neighbors import KNeighborsClassifier
from tiny_run import CPU, tiny_config
from torchvision.transforms.v2.functional import resize

from stop_mim.data.augment import normalise
from stop_mim.errors import InputError
from stop_mim.models.neighbours import knn_votes
from stop_mim.training.config import ProbeConfig
from stop_mim.training.online_probe import evaluation_mode, make_probe, open_probe_data
from stop_mim.training.step import make_optimiser


def test_nothing_of_the_encoder_and_no_global_random_number_is_touched(colours, objective):
    optimiser = make_optimiser(objective, tiny_config().optim, CPU)
    images = torch.randn(2, 3, 32, 32)
    objective.target.requires_grad_(True)
    objective.target(images).square().mean().backward()
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in objective.target.named_parameters() if p.grad is not None}
    # A mixture of modes, as of an encoder of which a part is frozen.
    objective.target.vit.blocks[0].train()
    modes = [module.training for module in objective.modules()]
    random = torch.get_rng_state()
    probe = a_probe(colours, objective)
    learn(probe, objective, 3)
    assert probe.score(objective.target, nullcontext())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in objective.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.state_dict().items())
    after = {name: p.grad for name, p in objective.target.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    assert after.keys() == gradients.keys()
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in after.items())
    known = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    assert not known & {id(parameter) for parameter in probe.parameters()}


def test_features_are_those_of_an_encoder_that_drops_no_path(colours, objective):
    objective.encoder.train()
    with evaluation_mode(objective.encoder):
        assert not any(module.training for module in objective.encoder.modules())
    assert all(module.training for module in objective.encoder.modules())
    with pytest.raises(ZeroDivisionError), evaluation_mode(objective.encoder):
        _ = 1 / 0
    assert objective.encoder.training


def test_classes_that_any_encoder_tells_apart_are_learned(colours, objective):
    probe = a_probe(colours, objective)
    learn(probe, objective, 1)
    first = probe.score(objective.target, nullcontext())
    learn(probe, objective, 12)
    last = probe.score(objective.target, nullcontext())
    assert tuple(last) == NAMES
    assert last["probe/linear_top1"] == 100
    assert last["probe/knn_top1"] == 100
    # The head begins at zero: the loss of its first batch is that of guessing.
    assert first["probe/loss"] == pytest.approx(torch.tensor(3.0).log().item())
    assert last["probe/loss"] < 0.7 * first["probe/loss"]


def test_classes_that_nothing_tells_apart_are_not(colours, objective):
    data = open_probe_data(str(colours))
    classes = np.random.default_rng(0).permutation(data.train.classes)
    probe = make_probe(PROBE, replace(data, train=replace(data.train, labels=classes)), objective.target, CPU, 0)
    learn(probe, objective, 12)
    scores = probe.score(objective.target, nullcontext())
    assert scores["probe/linear_top1"] < 75
    assert scores["probe/knn_top1"] < 75


def test_the_scores_are_those_of_the_formulas(colours, objective):
    # Labels at random, so that accuracies are not all 100.
    data, random = open_probe_data(str(colours)), np.random.default_rng(1)
    splits = {
        name: replace(part, labels=random.integers(0, 3, len(part)))
        for name, part in (("train", data.train), ("test", data.test))
    }
    probe = make_probe(PROBE, replace(data, **splits), objective.target, CPU, 0)
    classes = torch.from_numpy(splits["test"].classes)
    learn(probe, objective, 5)
    mean, variance = probe.norm.running_mean.clone(), probe.norm.running_var.clone()
    scores = probe.score(objective.target, nullcontext())
    source = data.test.source
    pixels = resize(torch.stack([source.read(index) for index in range(12)]), [32, 32], antialias=True)
    features = objective.target(normalise(pixels)).mean(1).detach()
    neighbours = KNeighborsClassifier(5, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    neighbours.fit(probe.memory_features.numpy(), probe.memory_classes.numpy())
    expected = 100 * neighbours.score(features.numpy(), classes.numpy())
    assert 0 < expected < 100
    assert scores["probe/knn_top1"] == pytest.approx(expected)
    votes = knn_votes(probe.memory_features, probe.memory_classes, features, 5, 3)
    parts = (votes / votes.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(parts, neighbours.predict_proba(features.numpy()), atol=1e-4)
    # The statistics of the stream, to which the test images add nothing.
    assert torch.equal(probe.norm.running_mean, mean)
    standard = (features - mean) / (variance + probe.norm.eps).sqrt()
    predicted = (standard @ probe.head.weight.T + probe.head.bias).argmax(1)
    assert scores["probe/linear_top1"] == pytest.approx(100 * (predicted == classes).float().mean().item())


def test_a_score_needs_a_batch_and_its_loss_is_the_mean_since_the_last(colours, objective):
    probe = a_probe(colours, objective)
    assert probe.score(objective.target, nullcontext()) == {}
    totals = []
    for batch in range(4):
        before = probe.loss_sum.item()
        probe.learn(objective.target, batch, nullcontext())
        totals.append(probe.loss_sum.item() - before)
    assert probe.score(objective.target, nullcontext())["probe/loss"] == pytest.approx(sum(totals) / 4, rel=1e-5)
    probe.learn(objective.target, 4, nullcontext())
    only = probe.loss_sum.item()
    assert probe.score(objective.target, nullcontext())["probe/loss"] == pytest.approx(only)


def test_the_memory_holds_the_newest(colours, objective):
    probe, dim = a_probe(colours, objective, replace(PROBE, memory=5)), objective.target.dim
    for start, end in pairwise((0, 3, 6, 8)):
        numbers = torch.arange(start, end)
        probe.remember(numbers[:, None].expand(-1, dim).float(), numbers)
    assert sorted(probe.memory_classes.tolist()) == [3, 4, 5, 6, 7]
    assert torch.equal(probe.memory_features[:, 0].long(), probe.memory_classes)
    numbers = torch.arange(100, 113)
    probe.remember(numbers[:, None].expand(-1, dim).float(), numbers)
    assert sorted(probe.memory_classes.tolist()) == [108, 109, 110, 111, 112]


def test_features_that_are_not_finite_leave_no_trace(colours, objective):
    probe = a_probe(colours, objective)
    learn(probe, objective, 2)
    before = {name: tensor.clone() for name, tensor in probe.tensors().items()}
    objective.target.vit.norm.bias.data[0] = float("nan")
    learn(probe, objective, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in probe.tensors().items())


BAD = [
    ("batch_size", 1),
    ("every_steps", 0),
    ("score_every_steps", 0),
    ("lr", 0.0),
    ("lr", float("nan")),
    ("neighbours", 0),
    ("neighbours", 5000),
    ("memory", 0),
    ("test_images", 0),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InputError) as error:
        ProbeConfig(**{field: value})
    assert str(error.value).startswith(f"probe.{field} is {value}: ")
