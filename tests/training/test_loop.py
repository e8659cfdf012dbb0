"""A new run: what it learns from, what it leaves in its folder, and what it never does there."""

import itertools
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quiet_run import MOVING, TOTAL, comparable, quietly, run
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config, write_images

from stop_mim.errors import InputError
from stop_mim.exchange.loading import load_encoder
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    MaskConfig,
)
from stop_mim.training.loop import train
from stop_mim.training.run_folder import RunFolder, read_metrics
from stop_mim.training.step import TrainingStep


def test_a_run_that_computes_its_layers_again_learns_the_same_to_the_bit(tmp_path):
    config = tiny_config(out=tmp_path / "plain", positions=MOVING)
    run(config)
    run(replace(config, out=str(tmp_path / "recomputed"), speed=replace(config.speed, recompute=True)))
    assert_same_checkpoint(checkpoint_at(tmp_path / "plain", TOTAL), checkpoint_at(tmp_path / "recomputed", TOTAL))
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "recomputed")


@pytest.mark.parametrize("compat", [None, "release"])
def test_masks_that_change_their_size_are_not_taken_for_fixed_ones(tmp_path, monkeypatch, compat):
    def accelerated(step, speed, steps, say, warn, fixed_shapes):
        found.append(fixed_shapes)
        return step

    found = []
    monkeypatch.setattr("stop_mim.training.loop.accelerate", accelerated)
    encoder = EncoderConfig("tiny", image_size=(32, 32), patch_size=4, width=24, depth=2, heads=2)
    run(tiny_config(out=tmp_path / "run", stop_after_steps=1, encoder=encoder, masks=MaskConfig(compat=compat)))
    assert found == [compat is None]


def test_weights_really_move_and_depend_on_the_seed(tmp_path):
    run(tiny_config(out=tmp_path / "a"))
    run(tiny_config(out=tmp_path / "b", seed=1))
    run(tiny_config(out=tmp_path / "c", stop_after_steps=1))
    name = "model.encoder.vit.blocks.0.attn.qkv.weight"
    ends = [checkpoint_at(tmp_path / out, step).tensors[name] for out, step in (("a", 21), ("b", 21), ("c", 1))]
    assert all(not torch.allclose(one, other, atol=1e-3) for one, other in itertools.combinations(ends, 2))


def test_a_folder_is_never_used_twice(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=4))
    with pytest.raises(InputError, match="already holds a run"):
        run(tiny_config(out=tmp_path / "run"))
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


def test_checkpoints_are_pruned_but_for_milestones_which_need_not_be_regular_ones(tmp_path):
    # Seven steps an epoch: a milestone falls between the checkpoints of every fifth step.
    config = tiny_config(out=tmp_path / "run", checkpoint=CheckpointConfig(5, keep=1, milestone_every_epochs=2))
    run(config)
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == [14, 21]


def test_the_encoder_can_be_loaded_and_is_the_target(tmp_path):
    run(tiny_config(out=tmp_path / "run"))
    encoder = load_encoder(tmp_path / "run")
    assert not encoder.training
    saved = checkpoint_at(tmp_path / "run", TOTAL).tensors
    for name, tensor in encoder.vit.state_dict().items():
        assert torch.equal(tensor, saved[f"model.target.vit.{name}"]), name
    images = torch.randn(2, 3, 32, 32)
    assert encoder(images).shape == (2, 16, 24)
    assert torch.isfinite(encoder(images)).all()


def test_a_run_can_begin_anew_where_one_was_ended_by_bad_images(tmp_path):
    data = write_images(tmp_path / "images", count=104)
    good = {number: (data / f"{number:03d}.png").read_bytes() for number in (3, 50)}
    for number, content in good.items():
        (data / f"{number:03d}.png").write_bytes(content[:60])
    config = tiny_config(data, tmp_path / "run", stop_after_steps=2)
    with pytest.raises(InputError, match="2 of the 104 images"):
        run(config)
    assert len((tmp_path / "run" / "bad_images.txt").read_text().splitlines()) == 2
    (data / "050.png").write_bytes(good[50])
    run(config)
    (line,) = (tmp_path / "run" / "bad_images.txt").read_text().splitlines()
    assert "003.png" in line


def test_the_default_folder_is_named_after_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, _ = quietly(train, tiny_config(stop_after_steps=1), recipe="tiny")
    assert result.folder.parent == Path("runs")
    assert result.folder.name.startswith("tiny-")
    assert RunFolder(result.folder).config().out == str(result.folder)


def test_a_run_that_fails_leaves_no_worker_behind(tmp_path, monkeypatch):
    taken = itertools.count(1)

    def fails(step, batches, values, seed):
        if next(taken) == 3:
            raise RuntimeError(f"unforeseen, beside {len(multiprocessing.active_children())} workers")
        return run_step(step, batches, values, seed)

    run_step = TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "__call__", fails)
    config = tiny_config(write_images(tmp_path / "images"), tmp_path / "run")
    # What is raised holds on to the frames, and to what they opened, until it has been told.
    with pytest.raises(RuntimeError, match="beside 2 workers") as failure:
        run(replace(config, speed=replace(config.speed, loader="streaming", workers=2)))
    assert failure.tb is not None
    assert not multiprocessing.active_children()
