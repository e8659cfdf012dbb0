"""A process that is stuck or has other data: the others end with one sentence that names it."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from ranks import run_ranks
from tiny_run import tiny_config, train_in, write_images

from stop_mim.training.config import SpeedConfig
from stop_mim.training.inputs import StepInputs
from stop_mim.training.watch import Place, Watch, describe, is_lost, last_of

SPEED = SpeedConfig("cpu", batch_size_per_device=2, workers=0, timeout_minutes=0.05)
FAULTS = ("stuck in a step", "stuck at the start", "other data")


def train_badly(folder, fault):
    """Train in two processes, of which the second does something wrong; what is printed goes to a file."""
    os.dup2(os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    config = tiny_config(write_images(folder / f"images of {os.environ['RANK']}"), speed=SPEED)
    if os.environ["RANK"] == "1":
        real = StepInputs.starting_at

        def starting_at(self, images, first_step):
            for number, batch in enumerate(real(self, images, first_step), start=1):
                if number == 3:
                    time.sleep(60)
                yield batch

        if fault == "stuck in a step":
            StepInputs.starting_at = starting_at
        elif fault == "stuck at the start":
            StepInputs.open_images = lambda *arguments: time.sleep(60)
        else:
            config = replace(config, data=str(write_images(folder / "others", count=57)))
    train_in(folder / "run", config)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Where each fault happened, the exit codes and the errors; at the same time, since most of it is waiting."""

    def end(fault):
        folder = tmp_path_factory.mktemp("fault")
        return folder, *run_ranks(2, train_badly, folder, fault, fails=True)

    with ThreadPoolExecutor(len(FAULTS)) as threads:
        return dict(zip(FAULTS, threads.map(end, FAULTS), strict=True))


@pytest.mark.parametrize(
    ("fault", "where"),
    [("stuck in a step", "step 3, reading images"), ("stuck at the start", "start-up, opening the images")],
)
def test_a_stuck_process_is_named_and_all_end(ends, fault, where):
    folder, codes, errors = ends[fault]
    assert codes == [1, 1]
    assert not errors
    (sentence,) = (folder / "printed.txt").read_text().splitlines()
    assert sentence.startswith(
        f"stop-mim: No process has made progress for 3 s: process 1 is stuck at {where}. All processes end"
    )
    begun = (folder / "run").exists()
    assert begun == (fault == "stuck in a step")
    assert not begun or sentence.removeprefix("stop-mim: ") in (folder / "run" / "log.txt").read_text()


def test_processes_with_other_data_are_refused(ends):
    folder, codes, errors = ends["other data"]
    assert codes == [1, 1]
    assert all("of process 1 differ from those of process 0" in text for text in errors)
    assert not (folder / "run").exists()


def test_who_is_behind_is_named():
    ahead, behind = Place(9, "step 3, in the update", 5.0, 20), Place(8, "step 3, reading images", 5.0, 20)
    assert last_of({0: ahead, 1: behind, 2: behind}) == {1, 2}
    assert last_of({0: ahead, 1: ahead}) == set()
    assert describe({1}, {0: ahead, 1: behind}, set()) == "process 1 is stuck at step 3, reading images"
    assert describe({2}, {0: ahead}, {2}) == "process 2 does not respond"
    assert describe(set(), {}, set()) == "all processes are stuck"
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_lost(RuntimeError("shapes"))
    assert not is_lost(ValueError("Connection closed"))


@pytest.mark.parametrize(("seconds", "silent", "ends"), [(0.5, set(), False), (0.5, {1}, True), (5.0, set(), True)])
def test_processes_wait_for_one_that_lives_and_moves(monkeypatch, seconds, silent, ends):
    """Such as the first one, which decodes labelled images alone."""
    watch, ended = Watch(), []
    watch._world_size, watch._timeout, watch.tell = 2, 3.0, ended.append
    places = {0: Place(9, "start-up, waiting", 5.0, 20), 1: Place(8, "start-up, decoding", seconds, 20)}
    monkeypatch.setattr(watch, "_look", lambda: (places, silent))
    monkeypatch.setattr(watch, "_ask", lambda question: None)
    monkeypatch.setattr(watch, "_end", lambda: None)
    watch._judge()
    assert ["process 1" in sentence for sentence in ended] == [True] * ends
