"""Hard days: after any fault no weights are worse than the last checkpoint, and the run ends as a quiet one does."""

import datetime
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from faulty_process import (
    TOTAL,
    Command,
    at_step,
    check_good,
    few_images,
    full_disk,
    killed_after,
    new_run,
    quiet_end,
    steps_done,
)
from tiny_run import assert_same_checkpoint, checkpoint_at

from stop_mim.training.callbacks import progress
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import LogConfig


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return few_images(tmp_path_factory.mktemp("faults") / "images")


@pytest.fixture(scope="module")
def expected(tmp_path_factory, images):
    return quiet_end(tmp_path_factory.mktemp("faults") / "quiet", images)


@pytest.fixture
def folder(tmp_path, images):
    return new_run(tmp_path / "run", images)


def resume(folder, fault=lambda: None, *options):
    return Command(["resume", folder, *options], folder.parent / "output.txt", fault)


def check_end(folder, expected):
    """All is good so far, and the rest of the run ends where the quiet run ended."""
    check_good(folder)
    again = resume(folder)
    assert again.wait() == 0, again.text()
    assert "Done: 12 steps" in again.text()
    assert_same_checkpoint(checkpoint_at(folder, TOTAL), expected)
    hidden = {path.name for path in folder.rglob(".*")}
    assert not hidden, "temporary files stay"


def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_had_not_been(folder, expected):
    chance = random.Random(0)
    for step in (0, 1, 4, 6, 9):
        command = resume(folder, at_step(step, killed_after(chance.uniform(0.001, 0.02))))
        assert command.wait() == -signal.SIGPROF, command.text()
        check_good(folder)
    check_end(folder, expected)


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(folder, expected):
    def killed_in(file):
        def install():
            sync = os.fsync

            def kill_instead(handle):
                if os.readlink(f"/proc/self/fd/{handle}").endswith(file) and steps_done(folder) >= 6:
                    os.truncate(handle, os.fstat(handle).st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                sync(handle)

            os.fsync = kill_instead

        return install

    for file, newest in (("step-00000006.safetensors", 3), ("encoder.safetensors", 6)):
        assert resume(folder, killed_in(file)).wait() == -signal.SIGKILL
        assert len(list(folder.rglob(f".{file}.*"))) == 1
        assert max(checkpoints_in(folder / "checkpoints")) == newest
    check_end(folder, expected)


def test_a_run_that_is_asked_to_stop_saves_at_once(folder, expected):
    # A terminal sends the signal to the workers too.
    cases = [("SIGTERM", os.kill, 0), ("SIGINT", os.killpg, 2), ("SIGHUP", os.killpg, 2), ("SIGUSR1", os.kill, 0)]
    for step, (name, send, workers) in enumerate(cases, start=2):
        number = getattr(signal, name)
        ask = at_step(step - 1, lambda send=send, number=number: send(os.getpid(), number))
        command = resume(folder, ask, "--speed.workers", workers)
        # Clusters give 30 seconds before they kill.
        assert command.wait(30) == 128 + number, command.text()
        assert f"Stopped by {name} after step {step} of 12; saved." in command.text()
        assert max(checkpoints_in(folder / "checkpoints")) == step
    check_end(folder, expected)


def test_a_disk_that_fills_up_is_one_sentence(tmp_path, images, expected):
    log = LogConfig(every_steps=1, health_every_steps=5, tensorboard=True)
    folder = new_run(tmp_path / "run", images, log=log)

    def fill_events():
        (events,) = (fd for fd in os.listdir("/proc/self/fd") if "tfevents" in os.path.realpath(f"/proc/self/fd/{fd}"))
        os.dup2(os.open("/dev/full", os.O_WRONLY), int(events))

    cases = {
        "tfevents": (fill_events, "No space left on device"),
        "metrics.jsonl": (full_disk(2000), "File too large"),
        "step-00000006": (full_disk(60_000), "File too large"),
    }
    for file, (fill, reason) in cases.items():
        command = resume(folder, at_step(4, fill))
        assert command.wait() == 2, command.text()
        assert re.search(rf"{file}\S*: {reason}: free some space", command.sentence())
    check_end(folder, expected)


def test_a_disk_that_fills_up_while_shards_are_written_is_one_sentence(folder):
    sharded = ("--speed.sharding", "full")
    assert resume(folder, lambda: None, *sharded, "--stop-after-steps", 3).wait() == 0
    command = resume(folder, at_step(3, full_disk(60_000)), *sharded)
    assert command.wait() == 2, command.text()
    assert "step-00000006.sharded: File too large: free some space" in command.sentence()
    # What is written in the background is looked at by the next save.
    check_good(folder, every=6)
    assert resume(folder, lambda: None, *sharded).wait() == 0
    assert not list(folder.rglob(".*")), "temporary files stay"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_is_killed_ends_the_run_with_a_sentence(folder, number):
    kill = at_step(2, lambda: os.kill(multiprocessing.active_children()[0].pid, number))
    command = resume(folder, kill, "--speed.workers", 2)
    assert command.wait() == 2, command.text()
    assert f"ended by signal {number.value}" in command.sentence()
    check_good(folder)


def test_a_run_whose_reader_is_gone_saves_at_once_and_goes_on_under_nohup(folder, expected):
    def close_pipe():
        reading, writing = os.pipe()
        for number in (1, 2):
            os.dup2(writing, number)
        os.close(reading)

    def reader_gone(step, hangup):
        signal.signal(signal.SIGHUP, hangup)
        progress.FIRST_INTERVAL = progress.LAST_INTERVAL = -1
        at_step(step, close_pipe)()

    command = resume(folder, lambda: reader_gone(4, signal.SIG_DFL))
    assert command.wait() == 128 + signal.SIGHUP
    # The step in which the line is lost, or the one after it.
    saved = max(checkpoints_in(folder / "checkpoints"))
    assert saved == steps_done(folder) <= 6
    assert resume(folder, lambda: reader_gone(saved + 1, signal.SIG_IGN)).wait() == 0
    assert steps_done(folder) == TOTAL
    check_end(folder, expected)


@pytest.mark.parametrize(("workers", "how"), [(2, "disappeared"), (0, "changed")])
def test_data_that_disappear_or_change_end_the_run_with_a_sentence(tmp_path, images, expected, workers, how):
    data, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    shutil.copytree(images, data)
    folder = new_run(tmp_path / "run", data)

    def fault():
        data.rename(elsewhere)
        if how == "changed":
            shutil.copytree(elsewhere, data)
            (data / "007.png").write_bytes((elsewhere / "009.png").read_bytes())

    command = resume(folder, at_step(4, fault), "--speed.workers", str(workers))
    assert command.wait() == 2, command.text()
    assert f"has {how} since the data were opened: restore it and resume the run" in command.sentence()
    shutil.rmtree(data, ignore_errors=True)
    elsewhere.rename(data)
    check_end(folder, expected)


def test_a_clock_that_jumps_changes_nothing(folder, expected):
    def install():
        chance, real = random.Random(0), time.time
        time.time = lambda: real() + chance.choice([-1e9, 0, 1e8])

        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.datetime.fromtimestamp(time.time(), tz)

        import stop_mim.training.run_folder as run_folder

        run_folder.datetime = Clock

    assert resume(folder, install, "--stop-after-steps", "5").wait() == 0
    assert resume(folder, install).wait() == 0
    check_end(folder, expected)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody without the right to write")
def test_a_directory_that_must_not_be_written_is_one_sentence(folder, expected, tmp_path):
    command = resume(folder, lambda: None, "--stop-after-steps", "4")
    assert command.wait() == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in (*tmp_path.parents, tmp_path):
        if path.is_relative_to(tmp_path.parents[2]):
            path.chmod(0o755)
    command = resume(folder, lambda: os.setuid(65534))
    assert command.wait() == 2
    assert "Permission denied" in command.sentence()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    check_end(folder, expected)


def test_a_worker_that_raises_ends_the_process(tmp_path):
    """A new interpreter: what hangs is its exit."""
    for number in range(200):
        (tmp_path / "data" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "a" / f"{number}.jpg").write_text("version https://git-lfs.github.com/spec/v1")
    command = f"{sys.executable} -m stop_mim pretrain demo --data {tmp_path / 'data'} --out {tmp_path / 'r'}".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2
    assert "can be read: check the data" in ended.stderr
    assert "Traceback" not in ended.stderr
