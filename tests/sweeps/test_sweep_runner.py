"""A whole sweep in worker processes: interrupted and continued, it ends as one that nobody disturbed."""

import json
import os
import signal
import threading
import time

import pytest
from mini_sweep import STEPS, install, mini_config, printed, silent

from stop_mim.sweeps.estimate import steps_done
from stop_mim.sweeps.outcome import Outcome, read_outcome, write_outcome
from stop_mim.sweeps.plan import make_plan, write_plan
from stop_mim.sweeps.runner import run_sweep
from stop_mim.sweeps.summary import as_json, summarise
from stop_mim.sweeps.worker import attempt


@pytest.fixture(autouse=True)
def _mini(monkeypatch):
    install(monkeypatch)


@pytest.fixture
def _late_signals_are_harmless():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def jobs_in(out, **fields):
    return list(make_plan("mini", mini_config(out, **fields)).jobs(out, (0, 1)))


def interrupt_when(condition):
    """Sends SIGTERM to this process as soon as the condition holds."""

    def wait():
        while not condition():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.usefixtures("_late_signals_are_harmless")
def test_an_interrupted_sweep_goes_on_to_the_same_summary(tmp_path):
    # In this process, without any of what runs sweeps: the numbers to be found.
    plain = tmp_path / "plain"
    write_plan(plain, make_plan("mini", mini_config(plain)))
    assert all(attempt(job, silent()) for job in jobs_in(plain))
    expected = as_json(summarise(plain))

    out = tmp_path / "sweep"
    jobs = jobs_in(out)
    interrupt_when(lambda: read_outcome(jobs[0].folder) is not None and steps_done(jobs[1]) >= 5)
    stopped = run_sweep("mini", mini_config(out), console := silent())
    assert stopped.interrupted_by == "SIGTERM"
    assert 1 <= stopped.finished < stopped.total == 4
    assert "go on with the same command" in printed(console)
    partial = json.loads((out / "summary.json").read_text())
    assert len(partial["unfinished"]) == 4 - stopped.finished

    done_before = {job.name: (job.folder / "environment.json").read_text() for job in jobs[: stopped.finished]}
    finished = run_sweep("mini", mini_config(out), console := silent())
    assert (finished.finished, finished.failed, finished.interrupted_by) == (4, 0, None)
    assert "4 of 4 runs" in printed(console)
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(expected))
    # Finished runs were skipped, and the one that was under way was resumed.
    for job in jobs[: stopped.finished]:
        assert (job.folder / "environment.json").read_text() == done_before[job.name]
    sessions = json.loads((jobs[stopped.finished].folder / "environment.json").read_text())
    assert 0 < sessions[1]["resumed_at_step"] <= STEPS
    assert expected["variants"]["noisy"]["scores"]["count/linear/top1"]["difference"]["n"] == 2


def test_finished_and_failed_runs_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr("stop_mim.sweeps.pool.COMMAND", ("false",))
    for number, job in enumerate(jobs_in(tmp_path)):
        outcome = Outcome(metrics={"count/linear/top1": float(number)}) if number < 3 else Outcome(error="It burnt.")
        write_outcome(job.folder, outcome)
    write_plan(tmp_path, make_plan("mini", mini_config(tmp_path)))
    result = run_sweep("mini", mini_config(tmp_path), console := silent())
    assert (result.finished, result.failed, result.total) == (3, 1, 4)
    assert "noisy seed 1 failed: It burnt." in printed(console)
    assert "--retry-failed" in printed(console)
    # Asked to, it is run again: here by a process that ends at once.
    again = run_sweep("mini", mini_config(tmp_path, retry_failed=True), silent())
    assert again.summary.failed[("noisy", 1)] == "Its process ended with code 1: the worker's log tells more."
    assert (again.finished, again.failed) == (3, 1)


def test_a_failing_run_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("stop_mim.sweeps.pool.COMMAND", ("false",))
    result = run_sweep("mini", mini_config(tmp_path / "out", side_by_side=2), silent())
    assert (result.finished, result.failed, result.total) == (0, 4, 4)
    assert result.summary.scores == {"fixed": {}, "noisy": {}}


def test_a_dry_run_shows_the_grid_and_the_time_and_leaves_nothing(tmp_path):
    result = run_sweep("mini", mini_config(tmp_path / "out", dry_run=True, side_by_side=2), console := silent())
    text = printed(console)
    assert "fixed (baseline)" in text
    assert "positions.kind stochastic, positions.sigma 1.0" in text
    assert "4 runs to go, 2 at a time: about" in text
    assert "a few steps of the baseline alone just now" in text
    assert not (tmp_path / "out").exists()
    assert result.summary is None


def test_a_dry_run_uses_the_rates_of_runs_that_are_there(tmp_path):
    jobs = jobs_in(tmp_path)
    write_plan(tmp_path, make_plan("mini", mini_config(tmp_path)))
    for job in jobs[:3]:
        job.folder.mkdir(parents=True)
        (job.folder / "metrics.jsonl").write_text('{"step": 20, "images_per_second": 1.0}\n')
    write_outcome(jobs[0].folder, Outcome(probe_seconds=7.0))
    run_sweep("mini", mini_config(tmp_path, dry_run=True), console := silent())
    # Two runs have 20 of 40 steps of 8 images left, one has all: 640 s, and three probes: 661 s.
    assert "3 runs to go, 1 at a time: about 11 min, if each keeps up 1 images/s (median of 3 runs in" in printed(
        console
    )
    assert "probes: 7 s a run" in printed(console)


@pytest.mark.parametrize(
    ("fields", "why"), [({}, "unknown without --data"), ({"data": "somewhere"}, "unknown until one of them has begun")]
)
def test_a_dry_run_says_when_the_time_is_unknown(fields, why, tmp_path):
    config = mini_config(tmp_path / "out", scale="imagenet", dry_run=True, **fields)
    run_sweep("tokens", config, console := silent())
    assert f"8 runs to go. Time: {why}" in printed(console)
