"""Commands in forked processes to which something bad happens: killed, cut off from disk, data or terminal."""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from tiny_run import checkpoint_at, tiny_config, write_images

from stop_mim import cli
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.config import CheckpointConfig
from stop_mim.training.run_folder import RunFolder, read_metrics

TOTAL = 12
LIMIT_S = 60


class Command:
    """A command of the command line in a process group of its own; `fault` is called there first.

    Forked, since a new interpreter would take ten times as long as the run itself.
    """

    def __init__(self, arguments, output, fault=lambda: None):
        self.output = Path(output)
        self.output.write_text("")
        self.pid = os.fork()
        if not self.pid:
            os._exit(self._run([str(argument) for argument in arguments], fault))

    def _run(self, arguments, fault):
        code = 70
        try:
            os.setsid()
            # Ignored where the tests run under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            faulthandler.disable()
            handle = os.open(self.output, os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(handle, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            fault()
            cli.main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
        return code

    def wait(self, limit=LIMIT_S):
        """Return the exit code, or minus the signal; a process that hangs is killed and fails the test."""
        deadline = time.monotonic() + limit
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {limit} s: {self.text()}")
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    def text(self):
        return self.output.read_text()

    def sentence(self):
        """The one line of the error, after asserting that there is no traceback."""
        lines = [line for line in self.text().splitlines() if line.startswith("stop-mim: ")]
        assert "Traceback" not in self.text(), self.text()
        assert len(lines) == 1, self.text()
        return lines[0]


def new_run(folder, images, **groups):
    """A run directory whose first command is `resume`: twelve steps, with checkpoints in mid-epoch."""
    config = tiny_config(images, folder, **{"checkpoint": CheckpointConfig(every_steps=3), **groups})
    RunFolder(folder).create(config, "tiny")
    return folder


def quiet_end(folder, images):
    """The last checkpoint of a run that nobody disturbed; in this process, so that forked ones have all imports."""
    cli.main(["resume", str(new_run(folder, images))])
    return checkpoint_at(folder, TOTAL)


def few_images(folder):
    """Streamed, since they differ in size."""
    return write_images(folder, count=32, sizes=((36, 36), (40, 60)))


def steps_done(folder):
    lines = read_metrics(folder)
    return int(lines[-1]["step"]) if lines else 0


def check_good(folder, every=3):
    """All checkpoints can be read, and the newest is at most so many steps before what was measured."""
    steps = checkpoints_in(folder / "checkpoints")
    for step, path in steps.items():
        assert read_checkpoint(path).step == step
    assert max(steps, default=0) >= steps_done(folder) - every


def at_step(step, action):
    """Return a fault that acts once, before the first step after this one or later."""

    def install():
        from stop_mim.training.trainer import Trainer

        take = Trainer.take_step

        def act_then_take(trainer, batches):
            if trainer.done >= step:
                Trainer.take_step = take
                action()
            return take(trainer, batches)

        Trainer.take_step = act_then_take

    return install


def killed_after(cpu_seconds):
    """Return a fault that kills the process, wherever it is, after so much time of the CPU."""

    def install():
        # No handler: the process is gone at once, as after SIGKILL.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)

    return install


def full_disk(free_bytes):
    """Return a fault after which files cannot grow beyond so many bytes."""

    def install():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, free_bytes))

    return install
