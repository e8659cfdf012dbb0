"""New runs: what they learn from, what they write to their directory, and what is refused before anything is written."""

import itertools
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import TOTAL, quietly, run, tiny_config, write_images

from stop_mim.errors import InputError
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import (
    CheckpointConfig,
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    SpeedConfig,
)
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.step import TrainingStep

DATA2VEC = {"objective": ObjectiveConfig("data2vec", target_layers=2), "masks": MaskConfig("blockwise", mask_ratio=0.6)}


def test_checkpoints_are_pruned_except_milestones_which_need_not_be_regular_ones(tmp_path):
    # Seven steps an epoch: a milestone falls between the checkpoints of every fifth step.
    run(tiny_config(out=tmp_path / "run", checkpoint=CheckpointConfig(5, keep=1, milestone_every_epochs=2)))
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == [14, 21]


def test_a_directory_is_named_after_the_recipe_and_never_used_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, text = quietly(train, tiny_config(stop_after_steps=1), recipe="tiny")
    assert result.folder.parent == Path("runs")
    assert result.folder.name.startswith("tiny-")
    assert RunFolder(result.folder).config().out == str(result.folder)
    assert "56 images" in text
    with pytest.raises(InputError, match="already contains a run"):
        run(tiny_config(out=result.folder))


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


def test_what_was_skipped_is_on_screen_in_the_log_and_in_the_records(tmp_path, monkeypatch):
    data = write_images(tmp_path / "images", count=20)
    write_images(data / "deep", count=3)
    (data / "003.png").write_bytes((data / "003.png").read_bytes()[:60])
    (data / "phone.heic").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    config = tiny_config("images", tmp_path / "run", stop_after_steps=1, max_bad="5%")
    _, text = quietly(train, config)
    for told in (text, (tmp_path / "run" / "log.txt").read_text()):
        assert "003.png" in told
        assert "1 unreadable; ignored: 1 .heic" in told
    folder = RunFolder(tmp_path / "run")
    assert folder.skipped() == "1 unreadable; ignored: 1 .heic; convert .heic files to JPEG to use them"
    assert folder.config().data == str(data), "the path is valid in any directory"
    # It is the same image in a later session, and where the data have moved: 2 of 23 would be too many.
    quietly(resume, tmp_path / "run", stop_after_steps=4)
    data.rename(tmp_path / "moved")
    quietly(resume, tmp_path / "run", data="moved")
    (line,) = folder.bad_images_file.read_text().splitlines()
    assert line.startswith(str(tmp_path / "moved"))
    with pytest.raises(InputError, match="max_bad is 5"):
        replace(config, max_bad="5")


def test_a_run_that_fails_leaves_no_worker_behind_and_says_so_in_its_status(tmp_path, monkeypatch):
    taken, real = itertools.count(1), TrainingStep.__call__

    def fails(step, batches, values, seed):
        if next(taken) == 3:
            raise RuntimeError(f"unforeseen, beside {len(multiprocessing.active_children())} workers")
        return real(step, batches, values, seed)

    monkeypatch.setattr(TrainingStep, "__call__", fails)
    config = tiny_config(write_images(tmp_path / "images"), tmp_path / "run")
    with pytest.raises(RuntimeError, match="beside 2 workers"):
        run(replace(config, speed=replace(config.speed, loader="streaming", workers=2)))
    assert not multiprocessing.active_children()
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"], status["total_steps"]) == ("failed", 2, TOTAL)
    assert status["message"] == "unforeseen, beside 2 workers"


def test_bad_input_is_refused_before_the_data_are_read_and_the_directory_is_made(tmp_path):
    def refused(message, **groups):
        with pytest.raises(InputError, match=message):
            run(tiny_config(**{"data": tmp_path / "missing", "out": tmp_path / "run", **groups}))
        assert not (tmp_path / "run").exists()

    refused("missing")
    refused(r"optim\.batch_size is 8", speed=SpeedConfig("cpu", batch_size_per_device=3))
    refused("masks", masks=MaskConfig(context_tokens=16))
    refused("'ijepaa': did you mean 'ijepa'", objective=ObjectiveConfig("ijepaa"))
    refused("tight", positions=PositionsConfig(covariance="tight"))
    refused(r"predictor\.width is 18", predictor=PredictorConfig(18, 1, 2))
    refused(r"masks\.kind is multiblock", objective=ObjectiveConfig("data2vec"))
    refused(r"positions\.kind is learned", **DATA2VEC, positions=PositionsConfig(kind="learned"))
    refused(r"target_layers is 3", **DATA2VEC | {"objective": ObjectiveConfig("data2vec", target_layers=3)})
    refused(r"target_layers is 2, which has no effect", objective=ObjectiveConfig(target_layers=2))
    refused(r"speed\.graph is True", speed=SpeedConfig("cpu", graph=True))
    refused("data is not given", data="")
    refused("no larger than the data", data="scenes:count=4,size=32")
