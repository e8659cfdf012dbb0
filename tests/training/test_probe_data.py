"""The labelled images of a probe: which are taken, how they are stored, and which labels are refused."""

import re
from dataclasses import replace
from itertools import islice

import numpy as np
import PIL.Image
import pytest
import torch
from probed_run import PROBE, a_probe, is_colour
from quiet_run import quietly
from tiny_run import COLOURS, CPU, tiny_config, tiny_objective, write_colours

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.errors import InputError
from stop_mim.training import online_probe
from stop_mim.training.online_probe import choose_images, make_probe, open_probe_data
from stop_mim.training.pretrain import train


def colours_of(images):
    """Undo the normalisation, since channels have different scales."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return images * std + mean


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
        assert probe.stream.n_images == 120
        assert "of 37x37" in probe.stream.description
        seen = list(islice(probe.stream.starting_at(), 7))
        assert sum(len(batch.indices) for batch in seen) >= 7 * 16 - 2
        assert all(is_colour(colours_of(batch.images), batch.labels).all() for batch in seen)
    batches = [probe._batch(3) for probe in probes]
    assert torch.equal(batches[0].images, batches[1].images)
    assert not torch.equal(batches[0].indices, batches[2].indices)


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
        sizes.append(re.search(r"\d+x\d+", probe.stream.description).group())
    assert sizes == ["20x30", "37x37"]
    assert "of 32x32" in probe.test.description


def test_the_choice_of_images_is_the_seeds():
    assert choose_images(5, 10, 0, "train").tolist() == [0, 1, 2, 3, 4]
    some = choose_images(1000, 20, 0, "train")
    assert len(set(some.tolist())) == 20
    assert np.array_equal(some, choose_images(1000, 20, 0, "train"))
    assert not np.array_equal(some, choose_images(1000, 20, 1, "train"))
    assert not np.array_equal(some, choose_images(1000, 20, 0, "test"))


def test_only_so_many_test_images_are_scored(colours, objective):
    probe = a_probe(colours, objective, replace(PROBE, test_images=5))
    (batch,) = probe.test.starting_at()
    assert len(batch.labels) == 5
    assert is_colour(colours_of(batch.images), batch.labels).all()


def test_counts_are_classes_and_are_learned_from_whole_images(objective):
    data = open_probe_data("scenes:count=60,size=32")
    assert (data.label, data.n_classes) == ("count", 8)
    for split in (data.train, data.test):
        assert np.array_equal(split.classes + 3, split.source.labels["count"])
    probe = make_probe(replace(PROBE, batch_size=4), data, objective.target, CPU, 0)
    images, classes, indices = probe._batch(1)
    assert torch.equal(classes, torch.from_numpy(data.train.classes)[indices])
    for image, index in zip(colours_of(images), indices.tolist(), strict=True):
        whole = data.train.source.read(index) / 255
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
