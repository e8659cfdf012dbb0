"""A run that goes on: bit for bit as if it had never stopped, or refused, but never restarted in silence."""

import itertools
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import (
    MID_EPOCH,
    STRONG,
    TOTAL,
    assert_same_checkpoint,
    checkpoint_at,
    comparable,
    go_on,
    quietly,
    run,
    tiny_config,
    write_images,
)

from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.ijepa import IJEPA
from stop_mim.training.callbacks.checkpoint import SaveRun
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint, save_checkpoint
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig, SpeedConfig
from stop_mim.training.continuation import CHECKPOINT_VERSION
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import RunFolder, read_metrics


@pytest.fixture(scope="module")
def mixed_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("mixed") / "images", sizes=((36, 36), (40, 60)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that was never stopped."""
    return run(tiny_config(out=tmp_path_factory.mktemp("finished") / "run")).folder


CASES = {
    "resident": {"positions": replace(STRONG, convention="release", apply_to="both", covariance="low_rank(2)")},
    "streamed, of several sizes, bf16": {"data": "mixed_images", "speed": SpeedConfig("cpu", "bf16", 4, "auto", 0)},
    "StoP in MAE": {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random"), "positions": STRONG},
    "data2vec": {
        "objective": ObjectiveConfig("data2vec", target_layers=2, beta=2.0),
        "masks": MaskConfig("blockwise", mask_ratio=0.6),
        "positions": PositionsConfig(kind="sincos"),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_and_if_stopped_in_mid_epoch_ends_as_if_it_had_not_been(request, tmp_path, case):
    groups = dict(CASES[case])
    if "data" in groups:
        groups["data"] = request.getfixturevalue(groups["data"])
    whole = run(tiny_config(out=tmp_path / "whole", **groups))
    assert (whole.step, whole.total_steps, whole.finished, whole.interrupted_by) == (TOTAL, TOTAL, True, None)
    part = run(tiny_config(out=tmp_path / "parts", stop_after_steps=MID_EPOCH, **groups))
    assert (part.step, part.total_steps, part.finished) == (MID_EPOCH, TOTAL, False)
    assert go_on(tmp_path / "parts").finished
    saved = checkpoint_at(tmp_path / "whole", TOTAL)
    assert_same_checkpoint(saved, checkpoint_at(tmp_path / "parts", TOTAL))
    together, apart = comparable(tmp_path / "whole"), comparable(tmp_path / "parts")
    assert [line["step"] for line in apart] == list(range(1, TOTAL + 1))
    for one, other in zip(together, apart, strict=True):
        # The step at which the run was stopped has health signs beside the rest.
        assert {name: other[name] for name in one} == one
        assert all(math.isfinite(value) for value in one.values())
    assert sum(line["loss"] for line in together[-5:]) < sum(line["loss"] for line in together[:5])
    # The encoder file is the target encoder; MAE has none.
    kept = (
        "model.target.vit." if any(name.startswith("model.target.") for name in saved.tensors) else "model.encoder.vit."
    )
    for name, tensor in load_encoder(tmp_path / "whole").vit.state_dict().items():
        assert torch.equal(tensor, saved.tensors[kept + name]), name


def test_several_stops_and_other_numbers_of_workers_change_nothing(tmp_path, mixed_images):
    run(tiny_config(mixed_images, tmp_path / "whole"))
    config = tiny_config(mixed_images, tmp_path / "parts", stop_after_steps=1)
    run(config)
    for workers, stop in ((2, 7), (0, 8), (1, None)):
        go_on(tmp_path / "parts", speed=replace(config.speed, workers=workers), stop_after_steps=stop)
    assert_same_checkpoint(checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL))


def test_a_run_goes_on_from_its_start_if_it_has_no_checkpoint(tmp_path, finished):
    RunFolder(tmp_path / "empty").create(tiny_config(out=tmp_path / "empty"), "tiny")
    RunFolder(tmp_path / "empty").record(1, {"loss": 7.0})
    go_on(tmp_path / "empty")
    assert_same_checkpoint(checkpoint_at(finished, TOTAL), checkpoint_at(tmp_path / "empty", TOTAL))
    assert comparable(tmp_path / "empty") == comparable(finished)


def test_a_run_never_goes_on_from_new_weights_if_it_was_given_some(tmp_path, monkeypatch):
    def killed(callback, trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(SaveRun, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        quietly(train, tiny_config(out=tmp_path / "run"), initialise=lambda objective, warn: "the weights of a friend")
    with pytest.raises(InputError, match="the weights of a friend"):
        quietly(resume, tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_finished_run_is_left_as_it_is_but_for_a_missing_or_stale_encoder(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run")
    encoder = load_file(tmp_path / "run" / "encoder.safetensors")
    files = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    result = go_on(tmp_path / "run")
    assert (result.step, result.finished) == (TOTAL, True)
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()} == files
    assert len(read_metrics(tmp_path / "run")) == TOTAL
    # A run that is killed between checkpoint and encoder leaves the encoder of an older step, or none.
    for break_encoder in (Path.unlink, lambda path: path.write_bytes(b"old")):
        break_encoder(tmp_path / "run" / "encoder.safetensors")
        go_on(tmp_path / "run")
        again = load_file(tmp_path / "run" / "encoder.safetensors")
        assert all(torch.equal(tensor, again[name]) for name, tensor in encoder.items())


def test_the_status_tells_where_a_run_is(tmp_path, monkeypatch):
    def state():
        status = RunFolder(tmp_path / "run").status()
        return status["state"], status["step"], status["total_steps"]

    seen = []
    monkeypatch.setattr(SaveRun, "after_step", lambda *given: seen.append(state()))
    monkeypatch.setattr("stop_mim.training.callbacks.progress.SECONDS_BETWEEN_STATUSES", -1.0)
    assert RunFolder(tmp_path / "run").status() is None
    run(tiny_config(out=tmp_path / "run", stop_after_steps=2))
    assert seen == [("running", 1, TOTAL), ("running", 2, TOTAL)]
    assert state() == ("stopped", 2, TOTAL)
    monkeypatch.undo()
    go_on(tmp_path / "run")
    assert state() == ("finished", TOTAL, TOTAL)


def test_a_checkpoint_of_another_version_is_refused_with_its_own_sentence(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=2))
    newest = RunFolder(tmp_path / "run").newest_checkpoint()
    saved = read_checkpoint(newest)
    for version, sentence in (
        (CHECKPOINT_VERSION + 1, "was saved by a newer version"),
        (1, "was saved by another version"),
    ):
        saved.state["run"]["version"] = version
        save_checkpoint(saved, newest)
        with pytest.raises(InputError, match=f"{newest.name} {sentence}"):
            go_on(tmp_path / "run", or_older=True)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_never_passed_over_in_silence(tmp_path, finished):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=MID_EPOCH))
    steps = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert list(steps) == [8, 10]
    damage(steps[10])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=rf"{steps[10].name}.*The checkpoint of step 8 is good: --or-older"):
        go_on(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    shutil.copytree(tmp_path / "run", tmp_path / "named")
    # Were the damaged one still there, it would be the newest, and the new one of step 9 would be pruned for it.
    go_on(tmp_path / "named", checkpoint=tmp_path / "named" / "checkpoints" / steps[8].name, stop_after_steps=9)
    assert max(checkpoints_in(tmp_path / "named" / "checkpoints")) == 9
    result, text = quietly(resume, tmp_path / "run", or_older=True)
    assert result.finished
    assert f"{steps[10].name} is damaged" in text
    assert_same_checkpoint(checkpoint_at(finished, TOTAL), checkpoint_at(tmp_path / "run", TOTAL))
    for path in checkpoints_in(tmp_path / "run" / "checkpoints").values():
        damage(path)
    # Never from the start, which would lose everything.
    with pytest.raises(InputError, match="is damaged"):
        go_on(tmp_path / "run", or_older=True)


def test_a_copy_of_the_data_is_the_same_data_and_other_pixels_are_not(tmp_path):
    data = write_images(tmp_path / "images", count=16)
    run(tiny_config(data, tmp_path / "run", stop_after_steps=1))
    image = data / "000.png"
    content, (access, changed) = image.read_bytes(), (image.stat().st_atime_ns, image.stat().st_mtime_ns)
    image.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="have changed"):
        go_on(tmp_path / "run")
    image.write_bytes(content)
    os.utime(image, ns=(access, changed + 1_000_000_000))
    assert go_on(tmp_path / "run", stop_after_steps=2).step == 2


def test_a_resumed_run_does_not_keep_the_old_checkpoint_on_the_disk(tmp_path, monkeypatch):
    mapped = []
    run(tiny_config(out=tmp_path / "run", stop_after_steps=1))
    monkeypatch.setattr(SaveRun, "after_step", lambda *given: mapped.append(Path("/proc/self/maps").read_text()))
    go_on(tmp_path / "run", stop_after_steps=2)
    assert mapped
    assert not any(str(tmp_path) in maps for maps in mapped)


def test_what_changes_rounding_or_random_draws_is_told_once(tmp_path, monkeypatch):
    data = write_images(tmp_path / "images")
    config = tiny_config(data, tmp_path / "run", stop_after_steps=1)
    run(config)
    # Images that were kept in memory stay there, also where memory is scarce now.
    monkeypatch.setattr("stop_mim.data.batches.resident_budget", lambda device, processes_on_host=1: 0)
    _, text = quietly(resume, tmp_path / "run", stop_after_steps=2)
    assert "Warning" not in text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    speed = replace(config.speed, loader="streaming")
    _, text = quietly(resume, tmp_path / "run", speed=speed, stop_after_steps=3)
    for told in ("used 1 CPU thread(s) and continues with 3", "was resident and is streaming now"):
        assert told in text
    _, text = quietly(resume, tmp_path / "run", speed=speed, stop_after_steps=4)
    assert "Warning" not in text


def test_data_that_have_moved_are_found_where_they_are_now(tmp_path):
    data = write_images(tmp_path / "before")
    run(tiny_config(data, tmp_path / "moved", stop_after_steps=4))
    data.rename(tmp_path / "after")
    with pytest.raises(InputError, match="give their new location with --data"):
        go_on(tmp_path / "moved")
    before = (tmp_path / "moved" / "config.json").read_text()
    with pytest.raises(InputError, match="have changed"):
        go_on(tmp_path / "moved", data="scenes:count=56,size=32")
    assert (tmp_path / "moved" / "config.json").read_text() == before
    # Without the times of the files, as after a plain copy.
    for file in (tmp_path / "after").iterdir():
        os.utime(file)
    go_on(tmp_path / "moved", data=str(tmp_path / "after"), stop_after_steps=5)
    assert go_on(tmp_path / "moved", stop_after_steps=6).step == 6


def test_images_are_decoded_where_they_were_before(tmp_path, mixed_images):
    run(tiny_config(mixed_images, tmp_path / "run", stop_after_steps=1))
    newest = RunFolder(tmp_path / "run").newest_checkpoint()
    saved = read_checkpoint(newest)
    assert (saved.state["run"]["loader"], saved.state["run"]["decode"]) == ("streaming", "cpu")
    saved.state["run"]["decode"] = "gpu"
    save_checkpoint(saved, newest)
    with pytest.raises(InputError, match=r"speed\.decode is gpu, but the device is cpu"):
        go_on(tmp_path / "run")
    go_on(tmp_path / "run", speed=SpeedConfig("cpu", decode="cpu"), stop_after_steps=2)


def test_a_run_cannot_stop_before_where_it_is(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=4))
    before = (tmp_path / "run" / "environment.json").read_text()
    with pytest.raises(InputError, match="stop_after_steps is 3, and step 4 is done"):
        go_on(tmp_path / "run", stop_after_steps=3)
    assert (tmp_path / "run" / "environment.json").read_text() == before
    assert go_on(tmp_path / "run", stop_after_steps=4).step == 4


def test_losses_that_are_not_finite_are_counted_over_a_resume(tmp_path, monkeypatch):
    def poison(patch, steps):
        calls = itertools.count(2)
        # Two batches a step.
        patch.setattr(IJEPA, "forward", lambda *given: real(*given) * (math.nan if next(calls) // 2 in steps else 1))

    real = IJEPA.forward
    with monkeypatch.context() as patch:
        poison(patch, {2, 3, 4, 5})
        run(tiny_config(out=tmp_path / "run", stop_after_steps=5))
    assert [line["not_finite"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    poison(monkeypatch, {1})
    with pytest.raises(TrainingDiverged, match=r"5 steps in a row, up to step 6.*optim\.lr"):
        go_on(tmp_path / "run")
