"""The online probe: scores that can be believed, of which the run itself notices nothing, in any number of sessions."""

import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import PIL.Image
import pytest
import torch
from rich.console import Console
from sklearn.neighbors import KNeighborsClassifier
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import COLOURS, CPU, assert_same_checkpoint, checkpoint_at, tiny_config, tiny_objective, write_colours

from stop_mim.data.augment import Augment, AugmentConfig, normalise, resize_batch
from stop_mim.data.loader import StoredImages
from stop_mim.errors import InputError
from stop_mim.models.neighbours import knn_votes
from stop_mim.training import online_probe
from stop_mim.training.config import LogConfig, ProbeConfig, SpeedConfig
from stop_mim.training.loop import resume, train
from stop_mim.training.online_probe import (
    LabelledImages,
    OnlineProbe,
    choose_images,
    evaluation_mode,
    make_probe,
    open_probe_data,
)
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import make_optimiser

TOTAL, MID_EPOCH = 21, 10
# Batches at 2, 4, 6 …, scores at 7, 14 and 21: a stop at 10 is in the middle of what the loss is averaged over.
PROBE = ProbeConfig(batch_size=16, every_steps=2, score_every_steps=7, lr=0.02, neighbours=5, memory=40)
NAMES = ("probe/linear_top1", "probe/knn_top1", "probe/loss")


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    return write_colours(tmp_path_factory.mktemp("probe") / "colours")


@pytest.fixture
def objective():
    return tiny_objective()


def quietly(function, *arguments, **options):
    console = Console(file=io.StringIO(), width=200)
    function(*arguments, console=console, **options)
    return console.file.getvalue()


def probing(colours, out, **groups):
    return tiny_config(out=out, probe=replace(PROBE, data=str(colours)), **groups)


def a_probe(colours, objective, config=PROBE, seed=0):
    return make_probe(config, open_probe_data(str(colours)), objective.target, CPU, seed)


def learn(probe, objective, batches):
    for batch in range(batches):
        probe.learn(objective.target, batch, nullcontext())


def measured(folder):
    """What was measured at each step, but for the speed."""
    return [
        {name: value for name, value in line.items() if name != "images_per_second"} for line in read_metrics(folder)
    ]


def test_the_run_is_bit_for_bit_the_one_without_a_probe(tmp_path, colours):
    quietly(train, tiny_config(out=tmp_path / "without"))
    quietly(train, probing(colours, tmp_path / "with"))
    without, probed = (checkpoint_at(tmp_path / name, TOTAL).tensors for name in ("without", "with"))
    own = {name for name in probed if name.startswith("probe.")}
    assert probed.keys() - own == without.keys()
    assert all(torch.equal(tensor, probed[name]) for name, tensor in without.items())
    # It did work all the while.
    assert probed["probe.model.head.weight"].abs().sum() > 0
    assert probed["probe.model.seen"] == 16 * (TOTAL // 2)
    others = [{name: line[name] for name in line if name not in NAMES} for line in measured(tmp_path / "with")]
    assert others == measured(tmp_path / "without")


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
    probe = a_probe(colours, objective)
    shuffled = torch.randperm(len(probe.stream), generator=torch.Generator().manual_seed(0))
    probe.stream = replace(probe.stream, classes=probe.stream.classes[shuffled])
    learn(probe, objective, 12)
    scores = probe.score(objective.target, nullcontext())
    assert scores["probe/linear_top1"] < 75
    assert scores["probe/knn_top1"] < 75


def test_the_scores_are_those_of_the_formulas(colours, objective):
    probe = a_probe(colours, objective)
    # Labels at random, so that accuracies are not all 100.
    generator = torch.Generator().manual_seed(1)
    probe.stream = replace(probe.stream, classes=torch.randint(3, (36,), generator=generator))
    probe.test = replace(probe.test, classes=torch.randint(3, (12,), generator=generator))
    learn(probe, objective, 5)
    mean, variance = probe.norm.running_mean.clone(), probe.norm.running_var.clone()
    scores = probe.score(objective.target, nullcontext())
    source = open_probe_data(str(colours)).test.source
    pixels = resize_batch(torch.stack([source.read(index) for index in range(12)]), (32, 32))
    features = objective.target(normalise(pixels)).mean(1).detach()
    neighbours = KNeighborsClassifier(5, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    neighbours.fit(probe.memory_features.numpy(), probe.memory_classes.numpy())
    expected = 100 * neighbours.score(features.numpy(), probe.test.classes.numpy())
    assert 0 < expected < 100
    assert scores["probe/knn_top1"] == pytest.approx(expected)
    votes = knn_votes(probe.memory_features, probe.memory_classes, features, 5, 3)
    parts = (votes / votes.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(parts, neighbours.predict_proba(features.numpy()), atol=1e-4)
    # The statistics of the stream, to which the test images add nothing.
    assert torch.equal(probe.norm.running_mean, mean)
    standard = (features - mean) / (variance + probe.norm.eps).sqrt()
    predicted = (standard @ probe.head.weight.T + probe.head.bias).argmax(1)
    assert scores["probe/linear_top1"] == pytest.approx(100 * (predicted == probe.test.classes).float().mean().item())


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


def empty_probe(memory, dim=2):
    config = replace(PROBE, memory=memory, neighbours=1)
    images = LabelledImages(StoredImages(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), None), torch.tensor([0, 1] * 2))
    return OnlineProbe(config, images, images, 2, dim, Augment(AugmentConfig(), (32, 32)), CPU, 0)


def test_the_memory_holds_the_newest():
    probe = empty_probe(memory=5)
    for start, end in pairwise((0, 3, 6, 8)):
        numbers = torch.arange(start, end)
        probe.remember(numbers[:, None].expand(-1, 2).float(), numbers)
    assert sorted(probe.memory_classes.tolist()) == [3, 4, 5, 6, 7]
    assert torch.equal(probe.memory_features[:, 0].long(), probe.memory_classes)
    numbers = torch.arange(100, 113)
    probe.remember(numbers[:, None].expand(-1, 2).float(), numbers)
    assert sorted(probe.memory_classes.tolist()) == [108, 109, 110, 111, 112]


def test_features_that_are_not_finite_leave_no_trace(colours, objective):
    probe = a_probe(colours, objective)
    learn(probe, objective, 2)
    before = {name: tensor.clone() for name, tensor in probe.tensors().items()}
    objective.target.vit.norm.bias.data[0] = float("nan")
    learn(probe, objective, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in probe.tensors().items())


@pytest.mark.parametrize("log", [LogConfig(1, 5, False), LogConfig(4, 1000, False)], ids=["often", "rarely"])
def test_a_run_that_was_stopped_has_the_scores_of_one_that_was_not(tmp_path, colours, log):
    quietly(train, probing(colours, tmp_path / "whole", log=log))
    quietly(train, probing(colours, tmp_path / "parts", log=log, stop_after_steps=MID_EPOCH))
    quietly(resume, tmp_path / "parts")
    whole, parts = (checkpoint_at(tmp_path / name, TOTAL) for name in ("whole", "parts"))
    assert_same_checkpoint(whole, parts)
    kinds = {"model.head", "model.norm", "model.memory_features", "model.memory_classes", "optimiser.exp_avg"}
    assert all(any(name.startswith(f"probe.{kind}") for name in whole.tensors) for kind in kinds)
    together = measured(tmp_path / "whole")
    apart = {line["step"]: line for line in measured(tmp_path / "parts")}
    assert [line["step"] for line in together if NAMES[0] in line] == [7, 14, 21]
    assert set(apart) == {line["step"] for line in together} | {MID_EPOCH}
    for line in together:
        assert {name: apart[line["step"]][name] for name in line} == line


def change_config(folder, change):
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


def test_a_checkpoint_without_a_probe_can_be_continued_with_one_and_the_other_way_round(tmp_path, colours):
    quietly(train, tiny_config(out=tmp_path / "run", stop_after_steps=4))
    change_config(tmp_path / "run", lambda fields: fields["probe"].update(data=str(colours), every_steps=2))
    text = quietly(resume, tmp_path / "run", stop_after_steps=8)
    assert "the probe starts anew" in text
    assert checkpoint_at(tmp_path / "run", 8).tensors["probe.model.batches"] == 2
    change_config(tmp_path / "run", lambda fields: fields["probe"].update(data=None))
    quietly(resume, tmp_path / "run")
    quietly(train, tiny_config(out=tmp_path / "plain"))
    assert_same_checkpoint(checkpoint_at(tmp_path / "run", TOTAL), checkpoint_at(tmp_path / "plain", TOTAL))


def test_other_labelled_images_make_a_new_probe(tmp_path):
    data = write_colours(tmp_path / "colours")
    quietly(train, probing(data, tmp_path / "run", stop_after_steps=6))
    (data / "train" / "red" / "003.png").unlink()
    text = quietly(resume, tmp_path / "run", stop_after_steps=8)
    assert "the probe starts anew" in text
    assert checkpoint_at(tmp_path / "run", 8).tensors["probe.model.batches"] == 1


def test_scores_are_seen_by_all_who_look(tmp_path, colours):
    log = LogConfig(every_steps=5, health_every_steps=100, tensorboard=True)
    text = quietly(train, probing(colours, tmp_path / "run", log=log))
    lines = [line for line in read_metrics(tmp_path / "run") if NAMES[0] in line]
    assert [line["step"] for line in lines] == [7, 14, 21]
    assert re.search(
        rf"training 21/21 .* probe {lines[-1][NAMES[0]]:.1f} kNN {lines[-1][NAMES[1]]:.1f}$", text, re.MULTILINE
    )
    assert "colours; 3 classes, 36 labelled images, scored on 12 others" in text
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in NAMES:
        assert [event.step for event in events.Scalars(name)] == [7, 14, 21]
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([line[name] for line in lines], rel=1e-5)


def is_colour(pixels, number):
    """Whether an image's strongest channel is that of the class: blue, green, red."""
    return pixels.float().mean((-2, -1)).argmax(-1) == 2 - torch.as_tensor(number)


def test_every_image_keeps_its_class_where_some_are_bad_or_left_out(tmp_path, monkeypatch):
    data = write_colours(tmp_path / "colours", splits=(("train", 80), ("test", 4)), sizes=((36, 36), (30, 50)))
    (data / "train" / "blue" / "007.png").write_bytes(b"broken")
    (data / "train" / "green" / "000.png").write_bytes(b"")
    # Stored as 37x37, so many bytes are 120 images.
    monkeypatch.setattr(online_probe, "STREAM_BYTES", 120 * 3 * 37 * 37)
    probes = [
        make_probe(PROBE, open_probe_data(str(data)), tiny_objective().target, CPU, seed, tmp_path / "bad.txt")
        for seed in (0, 0, 1)
    ]
    for probe in probes:
        assert 118 <= len(probe.stream) <= 120
        assert probe.stream.stored.pixels.shape[1:] == (3, 37, 37)
        assert set(map(tuple, probe.stream.stored.original_sizes.tolist())) == {(36, 36), (30, 50)}
        assert is_colour(probe.stream.stored.pixels, probe.stream.classes).all()
        images, classes = probe._batch(3)
        assert images.shape == (16, 3, 32, 32)
        # Normalised images have channels of other scales: back to colours.
        std = torch.tensor(probe.augment.std)[:, None, None]
        assert is_colour(images * std + torch.tensor(probe.augment.mean)[:, None, None], classes).all()
    assert torch.equal(probes[0].stream.stored.pixels, probes[1].stream.stored.pixels)
    assert not torch.equal(probes[0].stream.classes, probes[2].stream.classes)


def test_bad_images_are_listed_and_too_many_end_the_run_before_it_begins(tmp_path):
    data = write_colours(tmp_path / "colours", splits=(("train", 34), ("test", 4)))
    (data / "train" / "red" / "001.png").write_bytes(b"broken")
    config = tiny_config(out=tmp_path / "run", probe=replace(PROBE, data=str(data)), stop_after_steps=1)
    (data / "test" / "red" / "001.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"1 of the 12 images.*bad_images\.probe-test\.txt"):
        quietly(train, config)
    assert not (tmp_path / "run" / "config.json").exists()
    PIL.Image.new("RGB", (36, 36), COLOURS["red"]).save(data / "test" / "red" / "001.png")
    quietly(train, config)
    (line,) = (tmp_path / "run" / "bad_images.probe-train.txt").read_text().splitlines()
    assert "001.png" in line
    assert not (tmp_path / "run" / "bad_images.txt").exists()


def test_images_are_stored_in_their_own_size_unless_that_is_larger_than_needed(tmp_path):
    target = tiny_objective().target
    small = write_colours(tmp_path / "small", sizes=((20, 30),))
    large = write_colours(tmp_path / "large", sizes=((80, 80),))
    sizes = []
    for data in (small, large):
        probe = make_probe(PROBE, open_probe_data(str(data)), target, CPU, 0)
        sizes.append(tuple(probe.stream.stored.pixels.shape[-2:]))
        assert probe.test.stored.pixels.shape[-2:] == (32, 32)
    assert sizes == [(20, 30), (37, 37)]


def test_the_choice_of_images_is_the_seeds():
    assert choose_images(5, 10, 0, "train").tolist() == [0, 1, 2, 3, 4]
    some = choose_images(1000, 20, 0, "train")
    assert len(set(some.tolist())) == 20
    assert torch.equal(some, choose_images(1000, 20, 0, "train"))
    assert not torch.equal(some, choose_images(1000, 20, 1, "train"))
    assert not torch.equal(some, choose_images(1000, 20, 0, "test"))


def test_only_so_many_test_images_are_scored(colours, objective):
    probe = a_probe(colours, objective, replace(PROBE, test_images=5))
    assert len(probe.test) == 5
    assert is_colour(probe.test.stored.pixels, probe.test.classes).all()


def test_counts_are_classes_and_are_learned_from_whole_images(objective):
    data = open_probe_data("scenes:count=60,size=32")
    assert (data.label, data.n_classes) == ("count", 8)
    for split in (data.train, data.test):
        assert torch.equal(split.classes + 3, torch.as_tensor(split.source.labels["count"]))
    probe = make_probe(replace(PROBE, batch_size=4), data, objective.target, CPU, 0)
    images, classes = probe._batch(1)
    indices = probe.order.indices(1)
    assert torch.equal(classes, probe.stream.classes[indices])
    mean, std = (torch.tensor(values)[:, None, None] for values in (probe.augment.mean, probe.augment.std))
    for image, pixels in zip(images, probe.stream.stored.pixels[indices], strict=True):
        whole = (pixels / 255 - mean) / std
        assert any(torch.allclose(image, view, atol=1e-5) for view in (whole, whole.flip(-1)))


def refused(tmp_path, message, **probe):
    config = tiny_config(out=tmp_path / "run", probe=replace(PROBE, **probe))
    with pytest.raises(InputError, match=message):
        quietly(train, config)
    assert not (tmp_path / "run").exists()


def test_labels_that_are_missing_are_told_before_anything_is_written(tmp_path):
    data = write_colours(tmp_path / "colours")
    refused(tmp_path, "There is no data set", data=str(tmp_path / "nothing"))
    refused(
        tmp_path,
        r"probe\.label is 'distance'.*can be probed for count",
        data="scenes:count=60,size=32",
        label="distance",
    )
    refused(tmp_path, r"probe\.label is 'count'.*can be probed for class", data=str(data), label="count")
    refused(tmp_path, "no test split of its own", data=str(data / "train"))
    (data / "test" / "red").rename(data / "test" / "violet")
    refused(tmp_path, "violet", data=str(data))


def test_splits_that_do_not_fit_are_told(tmp_path, monkeypatch):
    data = write_colours(tmp_path / "colours")
    real = online_probe.open_source

    def changed(**labels):
        def open_changed(name, split):
            source = real(name, split)
            if split in labels:
                labels[split](source)
            return source

        monkeypatch.setattr(online_probe, "open_source", open_changed)

    changed(train=lambda source: source.labels.clear())
    refused(tmp_path, "images have no classes", data=str(data))
    changed(test=lambda source: source.labels.clear())
    refused(tmp_path, "test split has no label 'class'", data=str(data))
    changed(train=lambda source: source.labels["class"].fill(1))
    refused(tmp_path, "all its images have the same class", data=str(data))
    changed(test=lambda source: source.labels["class"].fill(7))
    refused(tmp_path, "test split has the class 7, which its train split has not", data=str(data))
    changed(test=lambda source: setattr(source, "class_names", ("blue", "red", "green")))
    refused(tmp_path, "classes of other names", data=str(data))


def test_a_test_split_without_some_of_the_classes_is_welcome(tmp_path):
    data = write_colours(tmp_path / "colours")
    for file in (data / "test" / "green").iterdir():
        file.unlink()
    (data / "test" / "green").rmdir()
    split = open_probe_data(str(data)).test
    assert sorted(set(split.classes.tolist())) == [0, 2]


def test_numbers_of_any_size_become_classes(colours, monkeypatch):
    real = online_probe.open_source

    def renumbered(name, split):
        source = real(name, split)
        source.labels["class"] = source.labels["class"] * 10 + 5
        return source

    monkeypatch.setattr(online_probe, "open_source", renumbered)
    data = open_probe_data(str(colours))
    assert data.n_classes == 3
    assert data.train.source.labels["class"].tolist() == [5] * 12 + [15] * 12 + [25] * 12
    assert data.train.classes.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert data.test.classes.tolist() == [0] * 4 + [1] * 4 + [2] * 4


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("budget", [2**40, 0], ids=["on the device", "in the host's memory"])
def test_a_probe_on_a_gpu_goes_on_where_it_stopped(tmp_path, colours, monkeypatch, budget):
    monkeypatch.setattr(online_probe, "resident_budget", lambda device: budget)
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
