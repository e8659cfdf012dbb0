"""One or all of several processes are killed, in a save too: nothing is lost, and the run ends as a quiet one does."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty_process import at_step
from ranks import run_ranks
from tiny_run import assert_same_checkpoint, tiny_config, train_in

from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.config import CheckpointConfig, SpeedConfig
from stop_mim.training.run_folder import RunFolder

TOTAL = 8


def train_and_die(folder, config, resumes, fault):
    """Train in this process of several, until the second is killed in a step, or both by the first that saves."""
    own = folder.parent / f"process-{os.environ['RANK']}"
    own.write_text(str(os.getpid()))

    def kill_all():
        # Itself last.
        for file in sorted(folder.parent.glob("process-*"), key=own.__eq__):
            os.kill(int(file.read_text()), signal.SIGKILL)

    if fault == "the second, in a step" and own.name == "process-1":
        at_step(4, lambda: os.kill(os.getpid(), signal.SIGKILL))()
    if fault == "all, in a save":
        sync = os.fsync

        def kill_instead(handle):
            if "step-00000006" in os.readlink(f"/proc/self/fd/{handle}"):
                os.truncate(handle, os.fstat(handle).st_size // 2)
                kill_all()
            sync(handle)

        os.fsync = kill_instead
    train_in(folder, config, resumes)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_killed_processes_lose_nothing(tmp_path, sharding):
    config = tiny_config(
        speed=SpeedConfig("cpu", batch_size_per_device=2, workers=0, timeout_minutes=0.1, sharding=sharding),
        checkpoint=CheckpointConfig(every_steps=3),
        stop_after_steps=TOTAL,
    )
    run, quiet = tmp_path / "run", tmp_path / "quiet"
    with ThreadPoolExecutor(1) as beside:
        undisturbed = beside.submit(run_ranks, 2, train_in, quiet, config)
        codes, errors = run_ranks(2, train_and_die, run, config, False, "the second, in a step", fails=True)
        assert codes == [1, -signal.SIGKILL]
        (text,) = errors
        assert "ProcessLost: The connection was lost: process 1 does not respond" in text
        assert "gloo" not in text
        assert "process 1" in RunFolder(run).status()["message"]
        assert list(checkpoints_in(run / "checkpoints")) == [3]
        codes, errors = run_ranks(2, train_and_die, run, config, True, "all, in a save", fails=True)
        assert codes == [-signal.SIGKILL] * 2, errors
        assert list(checkpoints_in(run / "checkpoints")) == [3]
        assert run_ranks(2, train_in, run, config, True) == [0, 0]
        assert undisturbed.result() == [0, 0]
    ends = [read_checkpoint(checkpoints_in(folder / "checkpoints")[TOTAL]) for folder in (run, quiet)]
    assert_same_checkpoint(*ends)
    assert not list(run.rglob(".*")), "temporary files stay"
