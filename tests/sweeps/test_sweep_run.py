"""Sweeps as processes: skipped, failed, retried, interrupted, continued."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import PIL.Image
import pytest
from mini_sweep import mini_config

from stop_mim.errors import InputError
from stop_mim.launch import LaunchConfig
from stop_mim.sweeps.grid import Sweep
from stop_mim.sweeps.launch import places
from stop_mim.sweeps.plan import base_config, make_plan
from stop_mim.sweeps.run import images_per_second, run_sweep
from stop_mim.sweeps.summary import summarise, summary_tables
from stop_mim.training.trial import Trial

HOLDER = """
import time
from pathlib import Path
from stop_mim.files import locked

with locked(Path("out/.lock")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_failed_runs_are_named_and_retried_on_demand(stand_in, console):
    Path("order-seed-0").write_text("refuse")
    Path("order-seed-1").write_text("die")
    result = run_sweep("mini", mini_config(), console=console)
    assert set(result.failed) == {"noisy/seed-0", "noisy/seed-1"}
    assert result.failed["noisy/seed-0"] == "data is not given: add --data."
    assert "SIGKILL" in result.failed["noisy/seed-1"]
    assert "noisy/seed-0 failed: data is not given" in console.file.getvalue()
    assert result.scores["fixed"]["linear/top1"].by_seed == {0: 5.0, 1: 6.0}
    before = stand_in()
    assert run_sweep("mini", mini_config(), console=console).failed
    assert stand_in() == before, "neither finished nor failed runs run again"
    run_sweep("mini", mini_config(dry_run=True), console=console)
    assert "All runs are done" not in console.file.getvalue()
    Path("order-seed-0").unlink()
    Path("order-seed-1").unlink()
    again = run_sweep("mini", mini_config(retry_failed=True), console=console)
    assert again.failed == {}
    assert again.scores["noisy"]["linear/top1"].difference.pairs == 2


def test_data_of_transfer_are_scored_too_also_after_the_training(stand_in, console):
    run_sweep("mini", mini_config(), console=console)
    assert len(stand_in()) == 8, "four trainings, four evaluations"
    given = mini_config(transfer=("rendered=scenes:count=32,size=32",))
    result = run_sweep("mini", given, console=console)
    assert len(stand_in()) == 12, "nothing is trained again"
    assert result.shown() == ["linear/top1", "rendered/linear/top1"]
    assert result.scores["noisy"]["rendered/linear/top1"].by_seed == {0: 5.0, 1: 6.0}
    Path("out/noisy/seed-1", make_plan("mini", given).probes[1].file).unlink()
    found = summarise(make_plan("mini", given), {})
    assert [table.rows[-1][1] for table in summary_tables(found)] == ["1 to 2", "1 to 2"]
    other = mini_config(transfer=("rendered=scenes:count=40,size=32",), dry_run=True)
    assert run_sweep("mini", other, console=console) is None
    shown = console.file.getvalue()
    assert "--data scenes:count=40,size=32" in shown, "scores on other data of the same name are not taken for these"
    assert "stop-mim resume" not in shown
    assert "Runs to do: 4, 1 at a time: evaluation only." in shown
    more = replace(other, seeds=(0, 1, 2))
    assert run_sweep("mini", more, console=console) is None
    # Two runs are left to train, of 40 steps of 8 images at 16 images a second.
    assert "Runs to do: 6, 1 at a time: about 40 seconds of training (as in 4 finished" in console.file.getvalue()


@pytest.mark.usefixtures("stand_in")
def test_data_of_transfer_that_cannot_be_scored_are_refused_before_the_training(console, tmp_path):
    PIL.Image.new("RGB", (32, 32)).save(tmp_path / "unlabelled.png")
    for data, words in (("x=nowhere", "'nowhere'"), (f"x={tmp_path}", "has no labels"), ("count=scenes", "'count'")):
        with pytest.raises(InputError, match=words):
            run_sweep("mini", mini_config(transfer=(data,)), console=console)
    assert not Path("out").exists()


def test_images_that_cannot_be_used_are_refused_before_the_training(mini, console, tmp_path):
    PIL.Image.new("RGB", (32, 32)).save(tmp_path / "unlabelled.png")
    mini["scale"] = replace(mini["scale"], evaluate=())
    for options, words in (({"probe_data": str(tmp_path)}, "has no labels"), ({"test_data": "nowhere"}, "'nowhere'")):
        with pytest.raises(InputError, match=words):
            run_sweep("mini", mini_config(**options), console=console)
    mini["sweep"] = Sweep("here", {"here": {"data": "scenes:count=40,size=32"}, "there": {"data": "nowhere"}})
    with pytest.raises(InputError, match="'nowhere'"):
        run_sweep("mini", mini_config(), console=console)
    assert not Path("out").exists()


@pytest.mark.usefixtures("stand_in")
def test_a_scale_may_score_videos(mini, console, tmp_path):
    (tmp_path / "videos" / "JPEGImages").mkdir(parents=True)
    mini["scale"] = replace(mini["scale"], evaluate=("--task", "video", "--data", "videos"))
    assert run_sweep("mini", mini_config(seeds=(0,), transfer=("count=scenes",)), console=console).failed == {}


def test_the_images_of_a_recipe_are_probed_where_no_others_are_given(mini):
    mini["scale"] = replace(mini["scale"], evaluate=())
    assert make_plan("mini", mini_config()).labelled_data == "scenes:count=32,size=32"


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_failed_on_data_of_transfer_is_finished_without_them(console, monkeypatch):
    monkeypatch.setattr("stop_mim.sweeps.run.open_task_data", lambda *_: [])
    given = mini_config(variants=("fixed",), seeds=(0,), transfer=("other=broken",))
    assert run_sweep("mini", given, console=console).failed == {"fixed/seed-0": "'broken' has no labels."}
    assert run_sweep("mini", replace(given, transfer=()), console=console).failed == {}
    assert set(run_sweep("mini", given, console=console).failed) == {"fixed/seed-0"}
    other = run_sweep("mini", replace(given, transfer=("more=scenes",)), console=console)
    assert (other.failed, other.scores["fixed"]["more/linear/top1"].n) == ({}, 1)


@pytest.mark.usefixtures("stand_in")
def test_what_failed_in_a_variant_that_is_not_asked_for_is_no_failure(console):
    Path("order-seed-0").write_text("refuse")
    assert run_sweep("mini", mini_config(seeds=(0,)), console=console).failed
    assert run_sweep("mini", mini_config(seeds=(0,), variants=("fixed",)), console=console).failed == {}


@pytest.mark.usefixtures("stand_in")
def test_the_reason_of_a_failed_training_is_the_one_in_its_status(console):
    Path("order-seed-0").write_text("diverge")
    only = {"variants": ("noisy",), "seeds": (0,)}
    assert run_sweep("mini", mini_config(**only), console=console).failed == {"noisy/seed-0": "The loss is not finite."}
    # The next process fails before it writes a status.
    Path("order-seed-0").write_text("refuse")
    again = run_sweep("mini", mini_config(**only, retry_failed=True), console=console)
    assert again.failed == {"noisy/seed-0": "data is not given: add --data."}


@pytest.fixture
def _late_signals_are_harmless():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_late_signals_are_harmless")
@pytest.mark.parametrize("launch", ["local", "submitit"])
def test_an_interrupted_sweep_lets_runs_save_and_continues(stand_in, console, launch):
    if launch == "submitit":
        pytest.importorskip("submitit")
    Path("order-seed-0").write_text("wait")

    def interrupt():
        while not Path("out/noisy/seed-0/waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    config = {"seeds": (0,), "variants": ("noisy",), "launch": LaunchConfig(launch, gpus=0)}
    stopped = run_sweep("mini", mini_config(**config), console=console)
    assert stopped.interrupted_by == "SIGTERM"
    assert (stopped.failed, stopped.unfinished) == ({}, ["noisy/seed-0"])
    assert Path("out/noisy/seed-0/saved").exists()
    Path("order-seed-0").unlink()
    done = run_sweep("mini", mini_config(**config), console=console)
    assert (done.interrupted_by, done.unfinished) == (None, [])
    assert [line.split()[0] for line in stand_in()] == ["evaluate", "pretrain", "resume"]


@pytest.mark.usefixtures("stand_in")
def test_an_error_of_the_sweep_lets_runs_save(console, monkeypatch):
    def full(*arguments):
        while not Path("out/noisy/seed-0/waits").exists():
            time.sleep(0.05)
        raise OSError("full")

    Path("order-seed-0").write_text("wait")
    monkeypatch.setattr("stop_mim.sweeps.run.record", full)
    with pytest.raises(OSError, match="full"):
        run_sweep("mini", mini_config(side_by_side=2), console=console)
    assert Path("out/noisy/seed-0/saved").exists()


def test_what_a_killed_process_left_is_removed(stand_in, console):
    run_sweep("mini", mini_config(variants=("noisy",)), console=console)
    left = Path("out/fixed/seed-0/.config.json.x7")
    left.parent.mkdir(parents=True)
    left.touch()
    assert run_sweep("mini", mini_config(), console=console).unfinished == []
    assert not left.exists()


def test_runs_side_by_side_share_the_cores(stand_in, console, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    run_sweep("mini", mini_config(side_by_side=2, seeds=(0,)), console=console)
    assert {line.split()[-1] for line in stand_in()} == {"4"}


def test_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    shared = {"OMP_NUM_THREADS": "4"}
    assert places(2, "auto") == [{"CUDA_VISIBLE_DEVICES": name, **shared} for name in "0101"]
    assert places(4, "cuda:1") == [shared] * 4
    assert places(1, "cpu") == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert places(1, "cuda") == [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]


def test_a_dry_run_prints_grid_and_commands_and_estimates_from_measured_steps_or_runs(stand_in, console, monkeypatch):
    monkeypatch.setattr("stop_mim.sweeps.run.take_trial_steps", lambda *_: Trial(0.5, 0))
    base = base_config(mini_config())
    # Half a second a step of 16 images, which stand for the 32 on a CPU.
    many = replace(base, optim=replace(base.optim, batch_size=32))
    assert images_per_second(many) == 32
    assert images_per_second(replace(many, speed=replace(many.speed, batch_size_per_device=32))) == 32
    run_sweep("mini", mini_config(dry_run=True), console=console)
    assert not Path("out").exists()
    shown = console.file.getvalue()
    # Four runs of 10 epochs of 32 images at 16 images a second.
    assert "Runs to do: 4, 1 at a time: about 80 seconds of training (16 images/s on cpu" in shown
    for words in ("fixed (baseline)", "positions.sigma 1.0", "stop-mim pretrain demo", "stop-mim evaluate out/noisy"):
        assert words in shown
    run_sweep("mini", mini_config(dry_run=True), replace(base, data=""), console=console)
    assert "give --data to estimate the time of training (16 images/s" in console.file.getvalue()
    run_sweep("mini", mini_config(variants=("fixed",)), console=console)
    run_sweep("mini", mini_config(dry_run=True), console=console)
    # Two runs are left, of 40 steps of 8 images at 16 images a second.
    assert "Runs to do: 2, 1 at a time: about 40 seconds of training (as in 2 finished" in console.file.getvalue()


def test_a_directory_is_for_one_sweep_at_a_time(stand_in, console):
    run_sweep("mini", mini_config(seeds=(0,)), console=console)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(InputError, match="Another sweep runs in out"):
            run_sweep("mini", mini_config(), console=console)
        other.kill()
