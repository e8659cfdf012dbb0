"""A run: resumed bit for bit wherever it stopped, never poisoned by what is not finite, never restarted in silence."""

import io
import itertools
import json
import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from timm.models.vision_transformer import Block
from tiny_run import (
    CPU,
    assert_same_checkpoint,
    checkpoint_at,
    tiny_config,
    tiny_objective,
    write_colours,
    write_images,
)

from stop_mim.errors import InputError
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.ijepa import IJEPA
from stop_mim.training import interval
from stop_mim.training.build import build_objective
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint, save_checkpoint
from stop_mim.training.config import (
    CheckpointConfig,
    LogConfig,
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    ProbeConfig,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
)
from stop_mim.training.distributed import Ranks
from stop_mim.training.feasibility import split_batch
from stop_mim.training.loop import TrainingDiverged, resume, train
from stop_mim.training.run_folder import RunFolder, read_metrics
from stop_mim.training.step import TrainingStep

TOTAL, MID_EPOCH = 21, 10
MOVING = PositionsConfig(sigma_start=0.05, sigma=2.0, sigma_schedule="cosine")


def quietly(function, *arguments, **options):
    """With everything that a person would have seen, as text."""
    console = Console(file=io.StringIO(), width=200)
    return function(*arguments, console=console, **options), console.file.getvalue()


def run(config):
    return quietly(train, config)[0]


def go_on(path, **options):
    return quietly(resume, path, **options)[0]


@pytest.fixture(scope="module")
def mixed_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("mixed") / "images", sizes=((36, 36), (40, 60)))


@pytest.fixture(scope="module")
def equal_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("equal") / "images")


def comparable(folder):
    """What was measured at each step, but for the speed."""
    return [
        {name: value for name, value in line.items() if name != "images_per_second"} for line in read_metrics(folder)
    ]


CASES = {
    "resident": {},
    "resident folder": {"data": "equal_images"},
    "resident squashed": {"data": "mixed_images", "speed": SpeedConfig("cpu", "fp32", 4, "resident", 0)},
    "streaming": {"data": "mixed_images"},
    "one batch a step": {"speed": SpeedConfig("cpu", batch_size_per_device=8)},
    "moving sigma": {"positions": MOVING},
    "learned positions": {"positions": PositionsConfig(kind="learned")},
    "fixed positions": {"positions": PositionsConfig(kind="sincos")},
    "release": {"positions": replace(MOVING, convention="release", apply_to="both", covariance="low_rank(2)")},
    "random masks": {"masks": MaskConfig(kind="random")},
    "bf16": {"speed": SpeedConfig("cpu", "bf16", 4)},
    "bf16 between layers": {"speed": SpeedConfig("cpu", "bf16", 4, half_residual=True)},
    "shared context, recomputed": {
        "predictor": PredictorConfig(16, 1, 2, shared_context=True),
        "speed": SpeedConfig("cpu", batch_size_per_device=4, recompute=True),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_stopped_in_mid_epoch_ends_as_if_it_had_not_been(request, tmp_path, case):
    groups = dict(CASES[case])
    if "data" in groups:
        groups["data"] = request.getfixturevalue(groups["data"])
    whole = run(tiny_config(out=tmp_path / "whole", **groups))
    assert (whole.step, whole.total_steps, whole.finished, whole.interrupted_by) == (TOTAL, TOTAL, True, None)
    part = run(tiny_config(out=tmp_path / "parts", stop_after_steps=MID_EPOCH, **groups))
    assert (part.step, part.total_steps, part.finished) == (MID_EPOCH, TOTAL, False)
    assert go_on(tmp_path / "parts").finished
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL))
    together, apart = comparable(tmp_path / "whole"), comparable(tmp_path / "parts")
    assert [line["step"] for line in apart] == list(range(1, TOTAL + 1))
    for one, other in zip(together, apart, strict=True):
        # The step at which the run was stopped has health signs beside the rest.
        assert {name: other[name] for name in one} == one


MAE = {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")}
DATA2VEC = {
    "objective": ObjectiveConfig("data2vec", target_layers=2, beta=2.0),
    "masks": MaskConfig("blockwise", mask_ratio=0.6),
}
OBJECTIVES = {
    "mae": MAE | {"positions": PositionsConfig(kind="sincos")},
    "stop-mae": MAE | {"positions": MOVING},
    "data2vec": DATA2VEC | {"positions": PositionsConfig(kind="sincos")},
    "stop-data2vec": DATA2VEC | {"positions": MOVING},
    "ijepa from two layers": {"objective": ObjectiveConfig(target_layers=2, beta=0.5)},
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_a_run_of_any_objective_is_resumed_bit_for_bit(tmp_path, case):
    groups = OBJECTIVES[case]
    run(tiny_config(out=tmp_path / "whole", **groups))
    run(tiny_config(out=tmp_path / "parts", stop_after_steps=MID_EPOCH, **groups))
    assert go_on(tmp_path / "parts").finished
    whole, parts = checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL)
    assert whole.state == parts.state
    assert whole.tensors.keys() == parts.tensors.keys()
    assert all(torch.equal(tensor, parts.tensors[name]) for name, tensor in whole.tensors.items())
    for one, other in zip(comparable(tmp_path / "whole"), comparable(tmp_path / "parts"), strict=True):
        assert {name: other[name] for name in one} == one
    lines = read_metrics(tmp_path / "whole")
    assert sum(line["loss"] for line in lines[-5:]) < sum(line["loss"] for line in lines[:5])
    assert [line["sigma"] for line in lines][:: TOTAL - 1] == pytest.approx(
        [0.05, 2.0] if case.startswith("stop") else [0.25, 0.25] if case.startswith("ijepa") else [0.0, 0.0]
    )
    assert all(math.isfinite(value) for line in lines for value in line.values())
    kept = "model.encoder.vit." if "mae" in case else "model.target.vit."
    for name, tensor in load_encoder(tmp_path / "whole").vit.state_dict().items():
        assert torch.equal(tensor, whole.tensors[kept + name]), name


@pytest.mark.parametrize("case", ["stop-mae", "stop-data2vec"])
def test_a_probe_of_another_objective_changes_nothing_in_it(tmp_path, case):
    colours = write_colours(tmp_path / "colours")
    probe = ProbeConfig(str(colours), batch_size=8, every_steps=2, score_every_steps=7, neighbours=3, memory=32)
    run(tiny_config(out=tmp_path / "plain", **OBJECTIVES[case]))
    run(tiny_config(out=tmp_path / "probed", probe=probe, **OBJECTIVES[case]))
    plain, probed = checkpoint_at(tmp_path / "plain", TOTAL), checkpoint_at(tmp_path / "probed", TOTAL)
    assert all(torch.equal(tensor, probed.tensors[name]) for name, tensor in plain.tensors.items())
    scores = [line for line in read_metrics(tmp_path / "probed") if "probe/linear_top1" in line]
    assert [line["step"] for line in scores] == [7, 14, 21]
    assert scores[-1]["probe/knn_top1"] > 50


def test_the_layers_of_an_objective_are_its_transformer_layers_each_once():
    for groups, layers in ((MAE, 3), (DATA2VEC, 4), ({}, 5), (OBJECTIVES["ijepa from two layers"], 5)):
        objective = tiny_objective(**groups)
        found = objective.layers()
        assert len(found) == layers
        assert len(set(found)) == layers
        assert set(found) == {module for module in objective.modules() if isinstance(module, Block)}


def test_what_an_objective_cannot_do_is_refused_before_the_data_are_read(tmp_path):
    for groups, text in (
        ({"objective": ObjectiveConfig("data2vec")}, r"masks\.kind is multiblock"),
        (DATA2VEC | {"positions": PositionsConfig(kind="learned")}, r"positions\.kind is learned"),
        ({"objective": ObjectiveConfig(target_layers=3)}, r"objective\.target_layers is 3: the encoder has 2 layers"),
    ):
        with pytest.raises(InputError, match=text):
            run(tiny_config(tmp_path / "missing", tmp_path / "run", **groups))
        assert not (tmp_path / "run").exists()


def test_a_run_that_computes_its_layers_again_learns_the_same_to_the_bit(tmp_path):
    config = tiny_config(out=tmp_path / "plain", positions=MOVING)
    run(config)
    run(replace(config, out=str(tmp_path / "recomputed"), speed=replace(config.speed, recompute=True)))
    assert_same_checkpoint(checkpoint_at(tmp_path / "plain", TOTAL), checkpoint_at(tmp_path / "recomputed", TOTAL))
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "recomputed")


def test_the_configuration_decides_whether_blocks_share_a_context():
    for shared in (False, True):
        config = tiny_config(predictor=PredictorConfig(16, 2, 2, shared_context=shared))
        assert build_objective(from_json(to_json(config))).predictor.shared_context == shared


def test_weights_really_move_and_depend_on_the_seed(tmp_path):
    run(tiny_config(out=tmp_path / "a"))
    run(tiny_config(out=tmp_path / "b", seed=1))
    run(tiny_config(out=tmp_path / "c", stop_after_steps=1))
    name = "model.encoder.vit.blocks.0.attn.qkv.weight"
    ends = [checkpoint_at(tmp_path / out, step).tensors[name] for out, step in (("a", 21), ("b", 21), ("c", 1))]
    assert all(not torch.allclose(one, other, atol=1e-3) for one, other in itertools.combinations(ends, 2))


def test_several_stops_and_other_numbers_of_workers_change_nothing(tmp_path, mixed_images):
    run(tiny_config(mixed_images, tmp_path / "whole"))
    config = tiny_config(mixed_images, tmp_path / "parts", stop_after_steps=1)
    run(config)
    for workers, stop in ((2, 7), (0, 8), (1, None)):
        go_on(tmp_path / "parts", speed=replace(config.speed, workers=workers), stop_after_steps=stop)
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL))


def test_what_was_logged_and_saved_how_often_changes_nothing(tmp_path):
    run(tiny_config(out=tmp_path / "a"))
    rarely = tiny_config(out=tmp_path / "b", log=LogConfig(10, 1000, True), checkpoint=CheckpointConfig(1000))
    run(rarely)
    a, b = checkpoint_at(tmp_path / "a", TOTAL), checkpoint_at(tmp_path / "b", TOTAL)
    assert_same_checkpoint(a, b)
    lines = read_metrics(tmp_path / "b")
    assert [line["step"] for line in lines] == [1, 10, 20, 21]
    losses = [line["loss"] for line in read_metrics(tmp_path / "a")]
    assert lines[1]["loss"] == pytest.approx(sum(losses[1:10]) / 9)
    assert list((tmp_path / "b" / "tensorboard").iterdir())


class Killed(BaseException):
    """What no part of the run catches."""


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
    monkeypatch.setattr(interval, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.parametrize("kind", ["killed", "asked to stop"])
def test_a_line_of_measurements_is_the_mean_it_would_have_been(tmp_path, monkeypatch, kind):
    # Lines at 1, 5, 10, 15, 20 and 21, checkpoints at 7, 14 and 21: each line after a resume is half in the past.
    groups = {"log": LogConfig(5, 1000, False), "checkpoint": CheckpointConfig(7)}
    with monkeypatch.context() as patch:
        disturb(patch)
        run(tiny_config(out=tmp_path / "whole", **groups))
    for step in (9, 10):
        with monkeypatch.context() as patch:
            disturb(patch, step, kind)
            ends = pytest.raises(Killed) if kind == "killed" else nullcontext()
            with ends:
                go_on(tmp_path / "parts") if step > 9 else run(tiny_config(out=tmp_path / "parts", **groups))
    with monkeypatch.context() as patch:
        disturb(patch)
        go_on(tmp_path / "parts")
    assert [line["step"] for line in read_metrics(tmp_path / "whole")] == [1, 5, 10, 15, 20, 21]
    # The speed too: the steps before an interruption are not counted in the time after it.
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
    assert {line["images_per_second"] for line in read_metrics(tmp_path / "parts")} == {8.0}
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL))


def test_the_line_of_a_run_that_stops_early_is_one_more(tmp_path):
    log = LogConfig(6, 1000, False)
    run(tiny_config(out=tmp_path / "whole", log=log))
    run(tiny_config(out=tmp_path / "parts", log=log, stop_after_steps=MID_EPOCH))
    losses = [line["loss"] for line in read_metrics(tmp_path / "parts")]
    go_on(tmp_path / "parts")
    whole, parts = comparable(tmp_path / "whole"), comparable(tmp_path / "parts")
    assert [line["step"] for line in parts] == [1, 6, MID_EPOCH, 12, 18, 21]
    assert [line for line in parts if line["step"] != MID_EPOCH] == whole
    assert [line["loss"] for line in parts][:3] == losses


def test_checkpoints_from_before_losses_were_kept_in_them_can_be_continued(tmp_path):
    run(tiny_config(out=tmp_path / "whole"))
    run(tiny_config(out=tmp_path / "run", stop_after_steps=MID_EPOCH))
    newest = RunFolder(tmp_path / "run").newest_checkpoint()
    saved = read_checkpoint(newest)
    state = {name: value for name, value in saved.state.items() if name not in ("pending_losses", "probe_fingerprint")}
    assert len(state) == len(saved.state) - 2
    save_checkpoint(replace(saved, state=state), newest)
    go_on(tmp_path / "run")
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "run", TOTAL))


def test_a_run_goes_on_from_its_start_if_it_has_no_checkpoint(tmp_path):
    run(tiny_config(out=tmp_path / "whole"))
    RunFolder(tmp_path / "empty").create(tiny_config(out=tmp_path / "empty"), "tiny")
    RunFolder(tmp_path / "empty").record(1, {"loss": 7.0})
    go_on(tmp_path / "empty")
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "empty", TOTAL))
    assert comparable(tmp_path / "empty") == comparable(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(tmp_path):
    run(tiny_config(out=tmp_path / "run"))
    files = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    result = go_on(tmp_path / "run")
    assert (result.step, result.finished) == (TOTAL, True)
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()} == files
    assert len(read_metrics(tmp_path / "run")) == TOTAL


def test_a_folder_is_never_used_twice(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=4))
    with pytest.raises(InputError, match="already holds a run"):
        run(tiny_config(out=tmp_path / "run"))
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4


def test_the_measurements_are_those_of_the_schedules(tmp_path):
    run(tiny_config(out=tmp_path / "run", positions=MOVING))
    lines = read_metrics(tmp_path / "run")
    assert [lines[0][name] for name in ("lr", "weight_decay", "ema_momentum", "sigma")] == pytest.approx(
        [5e-4, 0.04, 0.9, 0.05]
    )
    assert [lines[-1][name] for name in ("lr", "weight_decay", "ema_momentum", "sigma")] == pytest.approx(
        [1e-4, 0.4, 1.0, 2.0]
    )
    assert lines[6]["epoch"] == 1
    assert {line["step"] for line in lines if "health/rankme" in line} == {1, 5, 10, 15, 20, 21}


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


def make_not_finite(monkeypatch, steps, batches_per_step=2):
    """The loss of the second batch of each of these steps, the first of which is 1, is not a number."""
    real, calls = IJEPA.forward, itertools.count(1)

    def forward(self, images, masks, generator=None):
        loss, call = real(self, images, masks, generator), next(calls)
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


def test_five_in_a_row_end_the_run_and_leave_nothing_of_it_behind(tmp_path, monkeypatch):
    make_not_finite(monkeypatch, range(5, 30))
    with pytest.raises(TrainingDiverged, match=r"5 steps in a row, the last of them step 9.*optim\.lr"):
        run(tiny_config(out=tmp_path / "run", checkpoint=CheckpointConfig(1, keep=30)))
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == list(range(1, 9))
    assert_no_checkpoint_has_a_nan(tmp_path / "run")
    good, last = checkpoint_at(tmp_path / "run", 4), checkpoint_at(tmp_path / "run", 8)
    assert all(torch.equal(tensor, last.tensors[name]) for name, tensor in good.tensors.items())
    for path in (tmp_path / "run").rglob("*.safetensors"):
        assert path.stat().st_size > 0
    assert torch.isfinite(load_encoder(tmp_path / "run")(torch.randn(1, 3, 32, 32))).all()


def test_four_in_a_row_do_not_end_the_run(tmp_path, monkeypatch):
    make_not_finite(monkeypatch, {1, 2, 3, 4, 6, 7, 8, 9})
    assert run(tiny_config(out=tmp_path / "run")).finished
    assert read_metrics(tmp_path / "run")[-1]["not_finite"] == 8


def test_the_row_is_counted_over_a_resume(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        make_not_finite(patch, {2, 3, 4, 5})
        run(tiny_config(out=tmp_path / "run", stop_after_steps=5))
    make_not_finite(monkeypatch, {1})
    with pytest.raises(TrainingDiverged, match="the last of them step 6"):
        go_on(tmp_path / "run")


def damage(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_never_passed_over_in_silence(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=MID_EPOCH))
    newest = RunFolder(tmp_path / "run").newest_checkpoint()
    damage(newest)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=newest.name):
        go_on(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("keep", [1, 2])
def test_an_older_checkpoint_can_be_named_and_the_damaged_one_is_out_of_the_way(tmp_path, keep):
    run(tiny_config(out=tmp_path / "whole"))
    config = tiny_config(out=tmp_path / "run", checkpoint=CheckpointConfig(4, keep=2), stop_after_steps=MID_EPOCH)
    run(config)
    steps = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert list(steps) == [8, 10]
    damage(steps[10])
    text = json.loads((tmp_path / "run" / "config.json").read_text())
    text["checkpoint"]["keep"] = keep
    (tmp_path / "run" / "config.json").write_text(json.dumps(text))
    # Were the damaged one still there, it would be the newest, and the new one of step 9 would be pruned for it.
    go_on(tmp_path / "run", checkpoint=steps[8], stop_after_steps=9)
    assert max(checkpoints_in(tmp_path / "run" / "checkpoints")) == 9
    go_on(tmp_path / "run")
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "run", TOTAL))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(tiny_config(out=tmp_path / "a", stop_after_steps=4))
    run(tiny_config(out=tmp_path / "b", stop_after_steps=4, positions=PositionsConfig(kind="learned")))
    with pytest.raises(InputError, match="does not fit this run"):
        go_on(tmp_path / "a", checkpoint=RunFolder(tmp_path / "b").newest_checkpoint())


def test_changed_data_are_refused(tmp_path):
    data = write_images(tmp_path / "images")
    run(tiny_config(data, tmp_path / "run", stop_after_steps=4))
    state = (data / "000.png").stat()
    os.utime(data / "000.png", ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000_000))
    with pytest.raises(InputError, match="have changed since step 4"):
        go_on(tmp_path / "run")
    os.utime(data / "000.png", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert go_on(tmp_path / "run").finished


def test_another_batch_size_per_device_is_told(tmp_path):
    config = tiny_config(out=tmp_path / "run", stop_after_steps=4)
    run(config)
    result, text = quietly(resume, tmp_path / "run", speed=replace(config.speed, batch_size_per_device=8))
    assert "began with 1 process(es) of 4 images: it goes on with 1 of 8, with other random draws" in text
    assert result.finished


def test_missing_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        go_on(tmp_path / "nothing")


def test_what_is_wrong_is_told_before_the_data_are_read_and_the_folder_is_made(tmp_path):
    def refused(message, **groups):
        with pytest.raises(InputError, match=message):
            run(tiny_config(**{"data": tmp_path / "missing", "out": tmp_path / "run", **groups}))
        assert not (tmp_path / "run").exists()

    refused("There is no data set")
    refused(r"optim\.batch_size is 8", speed=SpeedConfig("cpu", batch_size_per_device=3))
    refused("masks do not fit", masks=MaskConfig(context_tokens=16))
    refused("positions cannot be made", positions=PositionsConfig(covariance="tight"))
    refused("no larger than the data set", data="scenes:count=4,size=32")


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


def ranks(world_size):
    return Ranks(0, world_size, world_size, CPU)


def test_batches_are_split_over_devices_and_accumulated():
    def split(batch_size, per_device, world_size):
        config = TrainConfig(speed=SpeedConfig(batch_size_per_device=per_device))
        return split_batch(replace(config, optim=replace(config.optim, batch_size=batch_size)), ranks(world_size))

    assert split(64, None, 1) == (64, 1)
    assert split(64, None, 4) == (16, 1)
    assert split(64, 8, 1) == (8, 8)
    assert split(64, 8, 4) == (8, 2)
    for refused in ((64, 8, 3), (64, None, 3), (64, 128, 1), (2, None, 4)):
        with pytest.raises(InputError, match=f"optim.batch_size is {refused[0]}"):
            split(*refused)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_run_on_a_gpu_goes_on_where_it_stopped(tmp_path, equal_images, loader):
    speed = SpeedConfig("cuda", "auto", 4, loader, 2)
    run(tiny_config(equal_images, tmp_path / "whole", speed=speed))
    run(tiny_config(equal_images, tmp_path / "parts", speed=speed, stop_after_steps=MID_EPOCH))
    go_on(tmp_path / "parts")
    whole, parts = comparable(tmp_path / "whole"), comparable(tmp_path / "parts")
    # Sums on a GPU are not in a fixed order.
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], rel=1e-3)
    counters = {t.item() for n, t in checkpoint_at(tmp_path / "parts", TOTAL).tensors.items() if ".step." in n}
    assert counters == {TOTAL}
