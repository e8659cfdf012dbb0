"""Losses that are not finite: skipped, counted, never in a checkpoint, and too many in a row end the run."""

import itertools
import math

import pytest
import torch
from quiet_run import go_on, quietly, run
from tiny_run import checkpoint_at, tiny_config

from stop_mim.errors import TrainingDiverged
from stop_mim.models.ijepa import IJEPA
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import CheckpointConfig
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import read_metrics


def make_not_finite(monkeypatch, steps, batches_per_step=2):
    """The loss of the second batch of each of these steps, the first of which is 1, is not a number."""
    real, calls = IJEPA.forward, itertools.count(1)

    def forward(self, *arguments):
        loss, call = real(self, *arguments), next(calls)
        return loss * float("nan") if call in {step * batches_per_step for step in steps} else loss

    monkeypatch.setattr(IJEPA, "forward", forward)


def assert_no_checkpoint_has_a_nan(folder):
    steps = checkpoints_in(folder / "checkpoints")
    assert steps
    for step in steps:
        for name, tensor in checkpoint_at(folder, step).tensors.items():
            assert torch.isfinite(tensor).all(), f"{name} of step {step}"


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch):
    make_not_finite(monkeypatch, {3, 9})
    config = tiny_config(out=tmp_path / "run", checkpoint=CheckpointConfig(1, keep=30))
    result, text = quietly(train, config)
    assert result.finished
    assert math.isfinite(result.loss)
    assert text.count("is not finite") == 2
    assert "Step 3: the loss or its gradient is not finite (nan); the step was skipped." in text
    counts = [line["not_finite"] for line in read_metrics(tmp_path / "run")]
    assert counts == [0] * 2 + [1] * 6 + [2] * 13
    assert_no_checkpoint_has_a_nan(tmp_path / "run")
    before, after = checkpoint_at(tmp_path / "run", 2), checkpoint_at(tmp_path / "run", 3)
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert after.state["not_finite"] == 1


def test_the_row_is_counted_over_a_resume(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        make_not_finite(patch, {2, 3, 4, 5})
        run(tiny_config(out=tmp_path / "run", stop_after_steps=5))
    make_not_finite(monkeypatch, {1})
    with pytest.raises(TrainingDiverged, match=r"5 steps in a row, up to step 6.*optim\.lr"):
        go_on(tmp_path / "run")
