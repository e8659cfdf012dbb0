"""Runs with a probe: no bit differs, they stop and go on anywhere, and their scores are seen."""

import json
import re

import pytest
import torch
from probed_run import NAMES, probing
from quiet_run import MID_EPOCH, TOTAL, comparable, quietly
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config, write_colours

from stop_mim.data import batches
from stop_mim.training.config import LogConfig, SpeedConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics


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
    others = [{name: line[name] for name in line if name not in NAMES} for line in comparable(tmp_path / "with")]
    assert others == comparable(tmp_path / "without")


@pytest.mark.parametrize("log", [LogConfig(1, 5, False), LogConfig(4, 1000, False)], ids=["often", "rarely"])
def test_a_run_that_was_stopped_has_the_scores_of_one_that_was_not(tmp_path, colours, log):
    quietly(train, probing(colours, tmp_path / "whole", log=log))
    quietly(train, probing(colours, tmp_path / "parts", log=log, stop_after_steps=MID_EPOCH))
    quietly(resume, tmp_path / "parts")
    whole, parts = (checkpoint_at(tmp_path / name, TOTAL) for name in ("whole", "parts"))
    assert_same_checkpoint(whole, parts)
    kinds = {"model.head", "model.norm", "model.memory_features", "model.memory_classes", "optimiser.exp_avg"}
    assert all(any(name.startswith(f"probe.{kind}") for name in whole.tensors) for kind in kinds)
    together = comparable(tmp_path / "whole")
    apart = {line["step"]: line for line in comparable(tmp_path / "parts")}
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
    _, text = quietly(resume, tmp_path / "run", stop_after_steps=8)
    assert "a new probe starts" in text
    assert checkpoint_at(tmp_path / "run", 8).tensors["probe.model.batches"] == 2
    change_config(tmp_path / "run", lambda fields: fields["probe"].update(data=None))
    quietly(resume, tmp_path / "run")
    quietly(train, tiny_config(out=tmp_path / "plain"))
    assert_same_checkpoint(checkpoint_at(tmp_path / "run", TOTAL), checkpoint_at(tmp_path / "plain", TOTAL))


def test_other_labelled_images_make_a_new_probe(tmp_path):
    data = write_colours(tmp_path / "colours")
    quietly(train, probing(data, tmp_path / "run", stop_after_steps=6))
    (data / "train" / "red" / "003.png").unlink()
    _, text = quietly(resume, tmp_path / "run", stop_after_steps=8)
    assert "a new probe starts" in text
    assert checkpoint_at(tmp_path / "run", 8).tensors["probe.model.batches"] == 1


def test_scores_are_seen_by_all_who_look(tmp_path, colours):
    log = LogConfig(every_steps=5, health_every_steps=100, tensorboard=True)
    _, text = quietly(train, probing(colours, tmp_path / "run", log=log))
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


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [2**40, 0], ids=["on the device", "in the host's memory"])
def test_a_probe_on_a_gpu_goes_on_where_it_stopped(tmp_path, colours, monkeypatch, budget):
    monkeypatch.setattr(batches, "resident_budget", lambda device, processes: budget)
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
