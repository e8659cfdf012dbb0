"""A process that is stuck, killed or has other data: the others end with one sentence that names it."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from processes import train_in
from ranks import run_ranks
from tiny_run import tiny_config, write_images

from stop_mim.training.config import SpeedConfig
from stop_mim.training.inputs import StepInputs
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.watch import Place, describe, is_lost, last_of

SPEED = SpeedConfig("cpu", batch_size_per_device=2, workers=0, timeout_minutes=0.05)


def train_badly(folder, config, what):
    """Train in two processes, of which the second does something wrong in its third step."""
    real = StepInputs.starting_at

    def starting_at(self, images, first_step):
        for number, batch in enumerate(real(self, images, first_step), start=1):
            if number == 3 and self.ranks.rank == 1:
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            yield batch

    StepInputs.starting_at = starting_at
    if what == "other data" and os.environ["RANK"] == "1":
        config = replace(config, data=str(write_images(Path(folder).parent / "others", count=57)))
    train_in(folder, config)


def test_a_stuck_process_is_named_and_all_end(tmp_path):
    codes, told = run_ranks(2, train_badly, tmp_path / "run", tiny_config(speed=SPEED), "stuck", fails=True)
    assert codes == [1, 1]
    assert not told
    assert "process 1 is stuck at step 3, reading images" in (tmp_path / "run" / "log.txt").read_text()


def test_a_killed_process_ends_the_others_with_a_sentence(tmp_path):
    codes, told = run_ranks(2, train_badly, tmp_path / "run", tiny_config(speed=SPEED), "killed", fails=True)
    assert codes[1] == -signal.SIGKILL
    (text,) = told
    assert "ProcessLost: The connection was lost: process 1 gives no sign of life" in text
    assert "gloo" not in text
    assert "process 1" in RunFolder(tmp_path / "run").status()["message"]


def test_processes_with_other_data_are_refused(tmp_path):
    data = write_images(tmp_path / "images")
    codes, told = run_ranks(2, train_badly, tmp_path / "run", tiny_config(data, speed=SPEED), "other data", fails=True)
    assert codes == [1, 1]
    assert all("of process 1 differ from those of process 0" in text for text in told)
    assert not (tmp_path / "run").exists()


def test_who_is_behind_is_named():
    ahead, behind = Place(9, "step 3, in the update", 5.0, 20), Place(8, "step 3, reading images", 5.0, 20)
    assert last_of({0: ahead, 1: behind, 2: behind}) == {1, 2}
    assert last_of({0: ahead, 1: ahead}) == set()
    assert describe({1}, {0: ahead, 1: behind}, set()) == "process 1 is stuck at step 3, reading images"
    assert describe({2}, {0: ahead}, {2}) == "process 2 gives no sign of life"
    assert describe(set(), {}, set()) == "all processes wait for one another"
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_lost(RuntimeError("shapes"))
    assert not is_lost(ValueError("Connection closed"))
