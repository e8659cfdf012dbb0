"""Lines of metrics: the same wherever a run was stopped, and whatever else is recorded."""

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import MID_EPOCH, TOTAL, assert_same_checkpoint, checkpoint_at, comparable, go_on, run, tiny_config

from stop_mim.training.callbacks import metrics
from stop_mim.training.config import CheckpointConfig, LogConfig
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import TrainingStep


def test_how_often_a_run_is_recorded_and_saved_changes_nothing(tmp_path):
    run(tiny_config(out=tmp_path / "a"))
    rarely = tiny_config(out=tmp_path / "b", log=LogConfig(10, 1000, True), checkpoint=CheckpointConfig(1000))
    run(rarely)
    assert_same_checkpoint(checkpoint_at(tmp_path / "a", TOTAL), checkpoint_at(tmp_path / "b", TOTAL))
    lines = read_metrics(tmp_path / "b")
    assert [line["step"] for line in lines] == [1, 10, 20, 21]
    losses = [line["loss"] for line in read_metrics(tmp_path / "a")]
    assert lines[1]["loss"] == pytest.approx(sum(losses[1:10]) / 9)


TWO_EPOCHS = replace(tiny_config().optim, epochs=2)


class Killed(BaseException):
    """An exception that no part of the run catches."""


def disturb(monkeypatch, step=None, kind=None):
    """A clock that moves by a second in each step, and a disturbance in the step of that number."""
    now, real = [0], TrainingStep.__call__

    def disturbed(*arguments):
        now[0] += 1
        if now[0] == step and kind == "killed":
            raise Killed
        if now[0] == step and kind == "asked to stop":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(TrainingStep, "__call__", disturbed)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.parametrize("kind", ["killed", "asked to stop"])
def test_a_line_is_the_mean_that_it_would_have_been_without_interruptions(tmp_path, monkeypatch, kind):
    # Lines at 1, 5, 10 and 14, checkpoints at 7 and 14: each line after a resume is half in the past.
    groups = {"log": LogConfig(5, 1000, False), "checkpoint": CheckpointConfig(7), "optim": TWO_EPOCHS}
    with monkeypatch.context() as patch:
        disturb(patch)
        run(tiny_config(out=tmp_path / "whole", **groups))
    for step in (9, 4):
        with monkeypatch.context() as patch:
            disturb(patch, step, kind)
            with pytest.raises(Killed) if kind == "killed" else nullcontext():
                go_on(tmp_path / "parts") if step < 9 else run(tiny_config(out=tmp_path / "parts", **groups))
    with monkeypatch.context() as patch:
        disturb(patch)
        go_on(tmp_path / "parts")
    assert [line["step"] for line in read_metrics(tmp_path / "whole")] == [1, 5, 10, 14]
    # The rate too: steps before an interruption are not counted in the time after it.
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
    assert {line["images_per_second"] for line in read_metrics(tmp_path / "parts")} == {8.0}
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", 14), checkpoint_at(tmp_path / "parts", 14))


def test_the_line_of_a_run_that_stops_early_is_one_more_and_events_of_repeated_steps_are_superseded(tmp_path):
    groups = {"log": LogConfig(6, 1000, True), "optim": TWO_EPOCHS}
    run(tiny_config(out=tmp_path / "whole", **groups))
    run(tiny_config(out=tmp_path / "parts", stop_after_steps=MID_EPOCH, **groups))
    go_on(tmp_path / "parts")
    whole, parts = comparable(tmp_path / "whole"), comparable(tmp_path / "parts")
    assert [line["step"] for line in parts] == [1, 6, MID_EPOCH, 12, 14]
    assert [line for line in parts if line["step"] != MID_EPOCH] == whole
    # From the checkpoint of step 12 on, steps come again.
    go_on(tmp_path / "parts", checkpoint=tmp_path / "parts" / "checkpoints" / "step-00000012.safetensors")
    events = EventAccumulator(str(tmp_path / "parts" / "tensorboard"))
    events.Reload()
    assert sorted({event.step for event in events.Scalars("loss")}) == [1, 6, MID_EPOCH, 12, 14]
    assert len(events.Scalars("loss")) == 5


def test_the_measurements_are_those_of_the_schedules(tmp_path):
    run(tiny_config(out=tmp_path / "run"))
    lines = read_metrics(tmp_path / "run")
    names = ("lr", "weight_decay", "ema_momentum")
    assert [lines[0][name] for name in names] == pytest.approx([5e-4, 0.04, 0.9])
    assert [lines[-1][name] for name in names] == pytest.approx([1e-4, 0.4, 1.0])
    assert lines[6]["epoch"] == 1
    assert {line["step"] for line in lines if "health/rankme" in line} == {1, 5, 10, 15, 20, 21}
