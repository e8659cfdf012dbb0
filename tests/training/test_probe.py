"""The online probe: scores that can be believed, labels that are checked, and a run that it does not change."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import PIL.Image
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import (
    COLOURS,
    CPU,
    MID_EPOCH,
    TOTAL,
    assert_same_checkpoint,
    checkpoint_at,
    comparable,
    quietly,
    tiny_config,
    tiny_objective,
    write_colours,
)
from torchvision.transforms.v2.functional import resize

from stop_mim.data import batches as batches_module
from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, normalise
from stop_mim.errors import InputError
from stop_mim.models.encoder import evaluation_mode
from stop_mim.training.callbacks import probe as probe_module
from stop_mim.training.callbacks.probe import OnlineProbe, open_probe_data
from stop_mim.training.checkpoint import collect_tensors
from stop_mim.training.config import LogConfig, ProbeConfig, SpeedConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import RunFolder, read_metrics

# Batches at 2, 4, 6 …, scores at 7, 14 and 21: a stop at 10 is in the middle of what the loss is averaged over.
PROBE = ProbeConfig(batch_size=16, every_steps=2, score_every_steps=7, lr=0.02, neighbours=5, memory=40)
NAMES = ("probe/linear_top1", "probe/knn_top1", "probe/loss")


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    return write_colours(tmp_path_factory.mktemp("probe") / "colours")


@pytest.fixture
def target():
    return tiny_objective().target


def probing(colours, out, **groups):
    return tiny_config(out=out, probe=replace(PROBE, data=str(colours)), **groups)


def a_probe(data, target, config=PROBE, seed=0, bad_images_file=None):
    data = data if isinstance(data, probe_module.ProbeData) else open_probe_data(str(data))
    return OnlineProbe(tiny_config(probe=config, seed=seed), data, target, nullcontext(), CPU, bad_images_file)


def learn(probe, batches):
    for batch in range(batches):
        probe.learn(batch)


def are_of_their_class(batch):
    """Whether the strongest channel of each image is that of its class: blue, green, red."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return bool(((batch.images * std + mean).mean((-2, -1)).argmax(-1) == 2 - batch.labels).all())


def test_the_encoder_its_gradients_and_the_global_generator_are_left_alone(colours, target):
    target.requires_grad_(True)
    target(torch.randn(2, 3, 32, 32)).square().mean().backward()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in target.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    # A mixture of modes, as of an encoder of which a part is frozen.
    target.vit.blocks[0].train()
    modes, random = [module.training for module in target.modules()], torch.get_rng_state()
    probe = a_probe(colours, target)
    learn(probe, 3)
    assert probe.score()
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in target.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    after = {name: p.grad for name, p in target.named_parameters() if p.grad is not None}
    assert after.keys() == gradients.keys()
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in after.items())
    with evaluation_mode(target):
        assert not any(module.training for module in target.modules())


def test_classes_that_any_encoder_tells_apart_are_learned(colours, target):
    probe = a_probe(colours, target)
    assert probe.score() == {}
    learn(probe, 1)
    # The head begins at zero: the loss of its first batch is that of guessing.
    assert probe.score()["probe/loss"] == pytest.approx(np.log(3))
    learn(probe, 12)
    losses = probe.loss_sum.item() / 12
    last = probe.score()
    assert tuple(last) == NAMES
    assert last["probe/linear_top1"] == last["probe/knn_top1"] == 100
    assert last["probe/loss"] == pytest.approx(losses)
    assert losses < 0.7 * np.log(3)


def test_the_scores_are_those_of_the_formulas(colours, target):
    # Labels at random, so that accuracies are not all 100.
    data, random = open_probe_data(str(colours)), np.random.default_rng(1)
    splits = {
        name: replace(part, labels=random.integers(0, 3, len(part)))
        for name, part in (("train", data.train), ("test", data.test))
    }
    probe = a_probe(replace(data, **splits), target)
    classes = torch.from_numpy(splits["test"].classes)
    learn(probe, 5)
    mean, variance = probe.norm.running_mean.clone(), probe.norm.running_var.clone()
    scores = probe.score()
    pixels = torch.stack([data.test.source.read(index) for index in range(12)])
    features = target(normalise(resize(pixels, [32, 32], antialias=True))).mean(1).detach()
    neighbours = KNeighborsClassifier(5, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    neighbours.fit(probe.memory_features.numpy(), probe.memory_classes.numpy())
    expected = 100 * neighbours.score(features.numpy(), classes.numpy())
    assert 0 < expected < 100
    assert scores["probe/knn_top1"] == pytest.approx(expected)
    # The statistics of the stream, to which the test images add nothing.
    assert torch.equal(probe.norm.running_mean, mean)
    standard = (features - mean) / (variance + probe.norm.eps).sqrt()
    predicted = (standard @ probe.head.weight.T + probe.head.bias).argmax(1)
    assert scores["probe/linear_top1"] == pytest.approx(100 * (predicted == classes).float().mean().item())


def test_the_memory_holds_the_newest(colours, target):
    probe = a_probe(colours, target, replace(PROBE, memory=5))
    for start, end in pairwise((0, 3, 6, 8)):
        numbers = torch.arange(start, end)
        probe.remember(numbers[:, None].expand(-1, target.dim).float(), numbers)
    assert sorted(probe.memory_classes.tolist()) == [3, 4, 5, 6, 7]
    assert torch.equal(probe.memory_features[:, 0].long(), probe.memory_classes)


def test_features_that_are_not_finite_leave_no_trace(colours, target):
    probe = a_probe(colours, target)
    learn(probe, 2)
    before = {name: tensor.clone() for name, tensor in collect_tensors(probe, probe.optimiser).items()}
    target.vit.norm.bias.data[0] = float("nan")
    learn(probe, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in collect_tensors(probe, probe.optimiser).items())


def test_every_image_keeps_its_class_where_some_are_bad_or_left_out(tmp_path, target, monkeypatch):
    data = write_colours(tmp_path / "colours", splits=(("train", 80), ("test", 4)), sizes=((36, 36), (30, 50)))
    (data / "train" / "blue" / "007.png").write_bytes(b"broken")
    (data / "train" / "green" / "000.png").write_bytes(b"")
    # Stored as 37x37, so many bytes are 120 images.
    monkeypatch.setattr(probe_module, "STREAM_BYTES", 120 * 3 * 37 * 37)
    config = replace(PROBE, test_images=5)
    probes = [a_probe(data, target, config, seed, tmp_path / "bad.txt") for seed in (0, 0, 1)]
    for probe in probes:
        assert (probe.stream.n_images, probe.test.n_images) == (120, 5)
        assert "of 37x37" in probe.stream.description
        seen = list(islice(probe.stream.starting_at(), 7))
        assert sum(len(batch.indices) for batch in seen) >= 7 * 16 - 2
        assert all(are_of_their_class(batch) for batch in [*seen, *probe.test.starting_at()])
    batches = [next(probe.stream.starting_at(3)) for probe in probes]
    assert torch.equal(batches[0].images, batches[1].images)
    assert not torch.equal(batches[0].indices, batches[2].indices)


def test_bad_images_are_listed_and_too_many_end_the_run_before_it_begins(tmp_path):
    data = write_colours(tmp_path / "colours", splits=(("train", 34), ("test", 4)))
    (data / "train" / "red" / "001.png").write_bytes(b"broken")
    (data / "test" / "red" / "001.png").write_bytes(b"broken")
    config = probing(data, tmp_path / "run", stop_after_steps=1)
    with pytest.raises(InputError, match=r"1 of the 12 images.*bad_images\.probe-test\.txt"):
        quietly(train, config)
    assert not (tmp_path / "run" / "config.json").exists()
    PIL.Image.new("RGB", (36, 36), COLOURS["red"]).save(data / "test" / "red" / "001.png")
    quietly(train, config)
    (line,) = (tmp_path / "run" / "bad_images.probe-train.txt").read_text().splitlines()
    assert "001.png" in line
    assert not (tmp_path / "run" / "bad_images.txt").exists()


def test_counts_are_classes_and_are_learned_from_whole_images(target):
    data = open_probe_data("scenes:count=60,size=32")
    assert (data.label, data.n_classes) == ("count", 8)
    for split in (data.train, data.test):
        assert np.array_equal(split.classes + 3, split.source.labels["count"])
    batch = next(a_probe(data, target, replace(PROBE, batch_size=4)).stream.starting_at(1))
    assert torch.equal(batch.labels, torch.from_numpy(data.train.classes)[batch.indices])
    for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
        whole = normalise(data.train.source.read(index)[None])[0]
        assert any(torch.allclose(image, view, atol=1e-4) for view in (whole, whole.flip(-1)))


def test_labels_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    def refused(message, **probe):
        with pytest.raises(InputError, match=message):
            quietly(train, tiny_config(out=tmp_path / "run", probe=replace(PROBE, **{"data": str(data)} | probe)))
        assert not (tmp_path / "run").exists()

    def changed(**labels):
        def open_changed(name, split):
            source = real(name, split)
            if split in labels:
                labels[split](source)
            return source

        monkeypatch.setattr(probe_module, "open_source", open_changed)

    data, real = write_colours(tmp_path / "colours"), probe_module.open_source
    refused("nothing", data=str(tmp_path / "nothing"))
    refused("'distance'.*count", data="scenes:count=60,size=32", label="distance")
    refused("are the same data", data=str(data / "train"))
    changed(train=lambda source: source.labels.clear())
    refused("no classes")
    changed(test=lambda source: source.labels.clear())
    refused("no label 'class'")
    changed(train=lambda source: source.labels["class"].fill(1))
    refused("the same class")
    changed(test=lambda source: source.labels["class"].fill(7))
    refused("class 7")
    changed(test=lambda source: setattr(source, "class_names", ("blue", "red", "green")))
    refused("other names")


# Lines at 4, 8 …, and where there are scores.
LOG = LogConfig(4, 1000, tensorboard=True)


@pytest.fixture(scope="module")
def probed(tmp_path_factory, colours):
    """A whole run with a probe, and what was shown of it."""
    folder = tmp_path_factory.mktemp("probed") / "run"
    return folder, quietly(train, probing(colours, folder, log=LOG))[1]


def test_a_probe_changes_no_bit_of_a_run_and_its_scores_are_shown(tmp_path, probed):
    folder, text = probed
    quietly(train, tiny_config(out=tmp_path / "without", log=LOG))
    without, tensors = (checkpoint_at(path, TOTAL).tensors for path in (tmp_path / "without", folder))
    own = {name for name in tensors if name.startswith("probe.")}
    assert tensors.keys() - own == without.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in without.items())
    assert tensors["probe.model.seen"] == 16 * (TOTAL // 2)
    scored = [line for line in comparable(folder) if NAMES[0] in line]
    last = rf"training 21/21 .* probe {scored[-1][NAMES[0]]:.1f} kNN {scored[-1][NAMES[1]]:.1f} at step 21"
    assert re.search(last, text, re.MULTILINE)
    assert "colours; 3 classes, 36 labelled images, scored on 12 others" in text
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in NAMES:
        assert [event.step for event in events.Scalars(name)] == [7, 14, 21]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in scored])


def test_a_run_that_was_stopped_has_the_scores_of_one_that_was_not(tmp_path, colours, probed):
    quietly(train, probing(colours, tmp_path / "parts", log=LOG, stop_after_steps=MID_EPOCH))
    quietly(resume, tmp_path / "parts")
    assert_same_checkpoint(checkpoint_at(probed[0], TOTAL), checkpoint_at(tmp_path / "parts", TOTAL))
    together = comparable(probed[0])
    apart = {line["step"]: line for line in comparable(tmp_path / "parts")}
    assert set(apart) == {line["step"] for line in together} | {MID_EPOCH}
    for line in together:
        assert {name: apart[line["step"]][name] for name in line} == line


def test_a_new_probe_starts_where_the_checkpoint_has_none_of_these_images(tmp_path):
    data = write_colours(tmp_path / "colours")
    quietly(train, tiny_config(out=tmp_path / "run", stop_after_steps=1))
    RunFolder(tmp_path / "run").write_config(probing(data, tmp_path / "run"))
    for stop in (3, 5):
        _, text = quietly(resume, tmp_path / "run", stop_after_steps=stop)
        assert "a new probe starts" in text
        assert checkpoint_at(tmp_path / "run", stop).tensors["probe.model.batches"] == 1
        (data / "train" / "red" / "003.png").unlink(missing_ok=True)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [2**40, 0], ids=["on the device", "in the host's memory"])
def test_a_probe_on_a_gpu_goes_on_where_it_stopped(tmp_path, colours, monkeypatch, budget):
    monkeypatch.setattr(batches_module, "resident_budget", lambda device, processes: budget)
    speed = SpeedConfig("cuda", "auto", 4)
    quietly(train, probing(colours, tmp_path / "whole", speed=speed))
    quietly(train, probing(colours, tmp_path / "parts", speed=speed, stop_after_steps=MID_EPOCH))
    quietly(resume, tmp_path / "parts")
    whole, parts = (
        [[line[name] for name in NAMES] for line in read_metrics(tmp_path / folder) if NAMES[0] in line]
        for folder in ("whole", "parts")
    )
    # Sums on a GPU are not in a fixed order.
    assert [line[2] for line in parts] == pytest.approx([line[2] for line in whole], rel=1e-2)
    assert whole[-1][0] == parts[-1][0] == 100
