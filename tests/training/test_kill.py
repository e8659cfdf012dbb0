"""A process that is killed at any moment, or asked to stop, is resumed bit for bit."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config, write_images

import stop_mim
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.config import CheckpointConfig, OptimConfig, TrainConfig, to_json
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics

SCRIPT = """
import sys
from pathlib import Path
from stop_mim.training.config import from_json
from stop_mim.training.pretrain import resume, train

verb, argument = sys.argv[1:]
result = train(from_json(Path(argument).read_text())) if verb == "train" else resume(argument)
print(result.step, result.interrupted_by)
"""

KILLED_WHILE_SAVING = """
import os, signal
from stop_mim.training import checkpoint

def save_half(tensors, file, metadata):
    whole(tensors, file, metadata)
    if metadata["step"] == "9":
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

whole, checkpoint.save_file = checkpoint.save_file, save_half
"""

TOTAL = 12 * 7


def slow_config(data, out) -> TrainConfig:
    """Long enough to be killed several times; checkpoints are at odd places of the epochs of seven steps."""
    optim = OptimConfig(epochs=12, batch_size=8, warmup_epochs=1.0, lr=2e-3, ema_start=0.9)
    return tiny_config(data, out, optim=optim, checkpoint=CheckpointConfig(every_steps=3))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("kill") / "images", sizes=((36, 36), (40, 60)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, images):
    """The last checkpoint of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("kill") / "whole"
    train(slow_config(images, out), console=Console(file=io.StringIO()))
    return checkpoint_at(out, TOTAL)


@pytest.fixture
def start(tmp_path, scene_cache):
    """Starts processes of a run, each in a process group of its own, and leaves none behind."""
    processes = []

    def begin(verb, argument, prelude=""):
        package_folder = str(Path(stop_mim.__path__[0]).parent)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "STOP_MIM_CACHE": str(scene_cache),
            "PYTHONPATH": os.pathsep.join([package_folder, os.environ.get("PYTHONPATH", "")]),
        }
        with (tmp_path / "output.txt").open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", prelude + SCRIPT, verb, str(argument)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def written_config(config, tmp_path):
    file = tmp_path / "wanted.json"
    file.write_text(to_json(config))
    return file


def steps_done(out):
    lines = read_metrics(out)
    return lines[-1]["step"] if lines else 0


def wait_for_step(process, out, step):
    deadline = time.monotonic() + 60
    while steps_done(out) < step:
        assert process.poll() is None, f"it ended with {process.returncode} before step {step}"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def finish(out):
    assert resume(out, console=Console(file=io.StringIO())).finished
    steps = [line["step"] for line in read_metrics(out)]
    assert steps == list(range(1, TOTAL + 1))
    return checkpoint_at(out, TOTAL)


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path, images, expected, start):
    chance = random.Random(0)
    out = tmp_path / "run"
    process = start("train", written_config(slow_config(images, out), tmp_path))
    kill_after = sorted(chance.sample(range(4, 60), 2))
    for step in kill_after:
        wait_for_step(process, out, step)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.wait()
        assert process.returncode == -signal.SIGKILL
        killed_at = steps_done(out)
        assert step <= killed_at < TOTAL
        for path in checkpoints_in(out / "checkpoints").values():
            assert read_checkpoint(path).step <= killed_at
        if step != kill_after[-1]:
            process = start("resume", out)
    assert_same_checkpoint(finish(out), expected)


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path, images, expected, start):
    out = tmp_path / "run"
    process = start("train", written_config(slow_config(images, out), tmp_path), KILLED_WHILE_SAVING)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(checkpoints_in(out / "checkpoints")) == [3, 6]
    assert len(list((out / "checkpoints").glob(".step-00000009*"))) == 1
    assert_same_checkpoint(finish(out), expected)
    assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("number", "to_all", "workers"),
    [(signal.SIGTERM, False, 0), (signal.SIGINT, True, 2)],
    ids=["kill", "Ctrl-C"],
)
def test_a_run_that_is_asked_to_stop_saves_and_ends_well(tmp_path, images, expected, start, number, to_all, workers):
    out = tmp_path / "run"
    config = slow_config(images, out)
    config = replace(config, speed=replace(config.speed, workers=workers))
    process = start("train", written_config(config, tmp_path))
    wait_for_step(process, out, 10)
    # A terminal sends the signal to the workers too.
    (os.killpg if to_all else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, (tmp_path / "output.txt").read_text()
    step, name = output.split()
    assert name == number.name
    assert 10 <= int(step) < TOTAL
    assert steps_done(out) == int(step) == max(checkpoints_in(out / "checkpoints"))
    assert_same_checkpoint(finish(out), expected)
