"""Worker processes: one run after the other, fresh ones after a failure, none left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from mini_sweep import install, mini_config

from stop_mim.errors import InputError
from stop_mim.sweeps import pool as pool_module
from stop_mim.sweeps.outcome import Outcome, read_outcome, write_outcome
from stop_mim.sweeps.plan import make_plan
from stop_mim.sweeps.pool import Pool
from stop_mim.sweeps.runner import locked
from stop_mim.sweeps.slots import fitting, memory_of_run, slot_environments
from stop_mim.training.recipes import find_recipe

# Does with each job what the seed says, without the seconds that the real one needs to import torch.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
for line in sys.stdin:
    job = json.loads(line)
    folder, seed = Path(job["config"]["out"]), job["seed"]
    if seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 4:
        sys.exit(7)
    if seed == 5:
        time.sleep(60)
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "half"
    half.write_text(json.dumps({"error": "It burnt." if seed == 2 else None, "metrics": {"pid": os.getpid()}}))
    half.rename(folder / "outcome.json")
    if seed == 2:
        sys.exit(1)
"""


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Jobs by what the fake worker does with them: 0 and 1 go well, 2 fails, 3 and 4 die, 5 takes too long."""
    install(monkeypatch)
    monkeypatch.setattr(pool_module, "COMMAND", (sys.executable, "-c", FAKE))
    jobs = list(make_plan("mini", mini_config(tmp_path)).jobs(tmp_path, range(6), ("noisy",)))
    return dict(enumerate(jobs))


def outcome_of(pool, timeout=20.0):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for _, outcome in pool.ended():
            return outcome
        time.sleep(0.01)
    raise AssertionError("no run ended")


def test_one_process_does_one_run_after_the_other(job_of, tmp_path):
    with Pool([{}], tmp_path / "logs") as pool:
        processes = []
        for seed in (0, 1):
            (worker,) = pool.idle()
            worker.give(job_of[seed])
            assert pool.busy() == [job_of[seed]]
            assert not pool.idle()
            processes.append(outcome_of(pool).metrics["pid"])
        process = worker.process
    assert processes[0] == processes[1] == process.pid
    assert process.returncode == 0


def test_a_failure_gets_a_fresh_process_and_an_old_outcome_is_forgotten(job_of, tmp_path):
    write_outcome(job_of[0].folder, Outcome(error="of another time"))
    with Pool([{}], tmp_path / "logs") as pool:
        (worker,) = pool.workers
        worker.give(job_of[2])
        failed = outcome_of(pool)
        assert failed.error == "It burnt."
        worker.give(job_of[0])
        well = outcome_of(pool)
        assert well.error is None
        assert well.metrics["pid"] != failed.metrics["pid"]


@pytest.mark.parametrize(("seed", "why"), [(3, "was ended by SIGKILL, perhaps for lack of memory"), (4, "code 7")])
def test_a_process_that_dies_is_a_failed_run(seed, why, job_of, tmp_path):
    with Pool([{}], tmp_path / "logs") as pool:
        (worker,) = pool.workers
        worker.give(job_of[seed])
        assert why in outcome_of(pool).error
        assert why in read_outcome(job_of[seed].folder).error
        worker.give(job_of[1])
        assert outcome_of(pool).error is None


def test_runs_are_side_by_side_and_stopped_together(job_of, tmp_path):
    with Pool([{}, {}], tmp_path / "logs") as pool:
        pool.workers[0].give(job_of[5])
        pool.workers[1].give(job_of[0])
        assert outcome_of(pool).error is None
        slow = pool.workers[0].process
        pool.stop()
        assert slow.returncode == -signal.SIGTERM
    assert read_outcome(job_of[5].folder) is None


def test_an_error_of_the_sweep_ends_its_workers(job_of, tmp_path):
    with contextlib.suppress(KeyboardInterrupt), Pool([{}], tmp_path / "logs") as pool:
        pool.workers[0].give(job_of[5])
        process = pool.workers[0].process
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGTERM


def test_a_folder_is_for_one_sweep_at_a_time_and_workers_keep_it(tmp_path):
    with locked(tmp_path) as lock:
        with pytest.raises(InputError, match=r"A sweep is running in .* already"), locked(tmp_path):
            pass
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    try:
        # The sweep is gone, its worker is not.
        with pytest.raises(InputError, match="already"), locked(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot be written .*: choose another --out"),
        locked(tmp_path / "file" / "x"),
    ):
        pass


def test_runs_on_the_cpu_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert slot_environments(1, "cpu", {}) == [{}]
    assert slot_environments(2, "cpu", {}) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert slot_environments(16, "cpu", {})[0] == {"OMP_NUM_THREADS": "1"}
    # Whoever has said how many threads is left alone.
    assert slot_environments(2, "cpu", {"OMP_NUM_THREADS": "3"}) == [{}, {}]


def test_runs_on_several_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    shared = {"OMP_NUM_THREADS": "4"}
    assert slot_environments(2, "auto", {}) == [{"CUDA_VISIBLE_DEVICES": name, **shared} for name in "0101"]
    assert slot_environments(1, "cuda", {"CUDA_VISIBLE_DEVICES": "5,7", "OMP_NUM_THREADS": "3"}) == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]
    assert slot_environments(4, "cuda:1", {}) == [shared] * 4
    assert slot_environments(1, "cuda:1", {}) == [{}]


def test_how_many_runs_fit_on_a_gpu():
    gib = 2**30
    assert fitting(10 * gib, 8 * gib, 22e6) == 1
    assert fitting(10 * gib, 24 * gib, 22e6) == 2
    assert fitting(10 * gib, 140 * gib, 22e6) == 4
    # A large model fills the GPU on its own.
    assert fitting(10 * gib, 140 * gib, 86e6) == 1
    small, large = find_recipe("stop-tiny-imagenet"), find_recipe("stop-vitb16")
    assert 5 * gib < memory_of_run(small) < 20 * gib
    assert memory_of_run(large) > 140 * gib
