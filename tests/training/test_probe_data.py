"""The labelled images of a probe: which are taken, how they are stored, and which labels are refused."""

from dataclasses import replace

import PIL.Image
import pytest
import torch
from probed_run import PROBE, a_probe, is_colour
from quiet_run import quietly
from tiny_run import COLOURS, CPU, tiny_config, tiny_objective, write_colours

from stop_mim.errors import InputError
from stop_mim.training import online_probe
from stop_mim.training.online_probe import choose_images, make_probe, open_probe_data
from stop_mim.training.pretrain import train


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
