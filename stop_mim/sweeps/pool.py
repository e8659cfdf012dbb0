"""Worker processes that do the runs of a sweep side by side, and end with it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import stop_mim
from stop_mim.sweeps.outcome import Outcome, outcome_file, read_outcome, write_outcome
from stop_mim.sweeps.plan import Job
from stop_mim.sweeps.worker import EXIT_INTERRUPTED

COMMAND = (sys.executable, "-m", "stop_mim.sweeps.worker")
SECONDS_TO_END = 20.0


class Worker:
    """A place for one run at a time; its process begins with the first, and anew after one that failed."""

    def __init__(self, environment: Mapping[str, str], log: IO[bytes], kept_open: Sequence[int] = ()) -> None:
        package_folder = str(Path(stop_mim.__path__[0]).parent)
        search = [package_folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(search)}
        self._log, self._kept_open = log, kept_open
        self.process: subprocess.Popen[str] | None = None
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        """Begin a run."""
        outcome_file(job.folder).unlink(missing_ok=True)
        if self.process is None:
            # A session of its own: Ctrl-C is for the sweep, which tells its workers.
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                text=True,
                start_new_session=True,
                pass_fds=self._kept_open,
            )
        self.job = job
        assert self.process.stdin is not None
        # A process that has ended meanwhile is found by `ended`.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(job.to_line() + "\n")
            self.process.stdin.flush()

    def ended(self) -> Outcome | None:
        """The outcome of the run, once it is over; a process that died of something else leaves one here."""
        job, process = self.job, self.process
        if job is None or process is None:
            return None
        code = process.poll()
        outcome = read_outcome(job.folder)
        if outcome is None and code is None:
            return None
        if outcome is None:
            outcome = Outcome(error=_cause(code))
            write_outcome(job.folder, outcome)
        if outcome.error is not None:
            self.finish(SECONDS_TO_END)
        self.job = None
        return outcome

    def stop(self) -> None:
        """Ask the run to save and to stop."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the process to end, so many seconds or as long as it takes, then end it."""
        process = self.process
        if process is None:
            return
        # Its end would interrupt a run once more, and a second time is not gentle.
        if self.job is None:
            self._close(process)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close(process)
        self.process = None

    @staticmethod
    def _close(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"Its process was ended by {name}{hint}: the worker's log tells more."
    if code == EXIT_INTERRUPTED:
        return "Its process was asked to stop by somebody else: go on with --retry-failed."
    return f"Its process ended with code {code}: the worker's log tells more."


class Pool:
    """Some workers, with a log each."""

    def __init__(self, environments: Sequence[Mapping[str, str]], logs: Path, kept_open: Sequence[int] = ()) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [(logs / f"worker-{number}.txt").open("ab") for number in range(1, len(environments) + 1)]
        self.workers = [Worker(one, log, kept_open) for one, log in zip(environments, self._logs, strict=True)]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for worker in self.workers:
                worker.stop()
        for worker in self.workers:
            worker.finish(SECONDS_TO_END)
        for log in self._logs:
            log.close()

    def idle(self) -> list[Worker]:
        """Those that have nothing to do."""
        return [worker for worker in self.workers if worker.job is None]

    def busy(self) -> list[Job]:
        """What is being done."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def ended(self) -> list[tuple[Job, Outcome]]:
        """Runs that have ended since the last look."""
        found = []
        for worker in self.workers:
            job, outcome = worker.job, worker.ended()
            if job is not None and outcome is not None:
                found.append((job, outcome))
        return found

    def stop(self) -> None:
        """Let every run save and stop, and wait for it as long as a step takes."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.finish()
