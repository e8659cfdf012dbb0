"""Runs of a sweep as processes of the ordinary commands: side by side on this machine, or as jobs of submitit."""

import os
import queue
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from stop_mim.errors import InputError
from stop_mim.interruption import Interruption, catch_interruption
from stop_mim.launch import POLL_SECONDS, PROGRAM, LaunchConfig, make_executor, rank_environment
from stop_mim.sweeps.plan import Job, Plan
from stop_mim.training.run_folder import RunFolder

Ended = tuple[Job, str | None]
"""A run whose processes have ended, and why it failed, if it did."""


def launch(jobs: Sequence[Job], plan: Plan, stop: Interruption) -> Generator[Ended]:
    """Run jobs, and yield each when it ends; after an interruption, running ones save and the others do not start."""
    options, logs = plan.options, plan.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if options.launch.is_job:
        yield from _launch_jobs(jobs, options.launch, logs, stop)
    else:
        yield from _launch_local(jobs, places(options.side_by_side, plan.base.speed.device), logs, stop)


def run_job(
    job: Job,
    program: Sequence[str],
    logs: Path,
    stop: Interruption,
    environment: Mapping[str, str],
    running: list["subprocess.Popen[bytes]"] | None = None,
) -> str | None:
    """Run what is left of training and evaluating a run; return why it failed, or None if it finished or was interrupted.

    Each process is added to `running`.
    """
    rank = environment.get("RANK", "0")
    log = logs / f"{job.variant}-seed-{job.seed}{f'.rank{rank}' if rank != '0' else ''}.txt"
    if rank == "0" and not (job.folder / "config.json").exists():
        # Files of a process that was killed before its first step.
        shutil.rmtree(job.folder, ignore_errors=True)
    before = _status(job.folder)
    for arguments in job.commands:
        if stop:
            return None
        with log.open("ab") as output:
            # In a new session: Ctrl-C reaches the sweep, which asks its runs to stop.
            process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            if running is not None:
                running.append(process)
            code = _wait(process, stop)
        if code and not stop:
            status = _status(job.folder)
            # A process that fails before its first step leaves the status of an earlier one.
            failed = status != before and status.get("state") == "failed"
            return status["message"] if failed else _reason(code, log)
    return None


def _status(run: Path) -> dict[str, Any]:
    """Return the contents of a run's status.json; empty if there is none, or it cannot be read."""
    with suppress(InputError):
        return RunFolder(run).status() or {}
    return {}


def _wait(process: subprocess.Popen[bytes], stop: Interruption) -> int:
    asked = False
    while (code := process.poll()) is None:
        if stop and not asked:
            process.terminate()
            asked = True
        time.sleep(POLL_SECONDS)
    return code


def _reason(code: int, log: Path) -> str:
    """Return why a process failed that left no record: the signal that ended it, or the last line that it printed."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"Ended by {name}{', perhaps for lack of memory' if name == 'SIGKILL' else ''}: see {log}."
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"Exit code {code}: see {log}.")
    return last.removeprefix("stop-mim: ")


def places(side_by_side: int, device: str) -> list[dict[str, str]]:
    """Return an environment for each run at a time: its GPU where there are several, and its number of threads."""
    import torch

    visible = [""]
    if device in ("auto", "cuda") and torch.cuda.device_count() > 1:
        numbers = ",".join(map(str, range(torch.cuda.device_count())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    found = [{"CUDA_VISIBLE_DEVICES": gpu} if gpu else {} for _ in range(side_by_side) for gpu in visible]
    if len(found) > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = str(max(1, (os.cpu_count() or 1) // len(found)))
        found = [{**place, "OMP_NUM_THREADS": threads} for place in found]
    return found


def _launch_local(
    jobs: Sequence[Job], environments: Sequence[Mapping[str, str]], logs: Path, stop: Interruption
) -> Generator[Ended]:
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for environment in environments:
        free.put(environment)

    def work(job: Job) -> str | None:
        environment = free.get()
        try:
            return run_job(job, PROGRAM, logs, stop, environment)
        finally:
            free.put(environment)

    with ThreadPoolExecutor(len(environments)) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except GeneratorExit:
            # The pool waits for its threads, and these for their processes.
            stop.signal_name = "SIGTERM"
            raise


def _launch_jobs(jobs: Sequence[Job], config: LaunchConfig, logs: Path, stop: Interruption) -> Generator[Ended]:
    executor = make_executor(config, config.logs or logs / "submitit", "stop-mim sweep")
    running = {executor.submit(JobTask(job, PROGRAM, logs)): job for job in jobs}
    try:
        while running and not stop:
            for submitted in [one for one in running if one.done()]:
                broken = submitted.exception()
                reason = submitted.result() if broken is None else f"{type(broken).__name__}: see {logs / 'submitit'}."
                yield running.pop(submitted), reason
            time.sleep(POLL_SECONDS)
    finally:
        for submitted in running:
            submitted.cancel()
    while running:
        for submitted in [one for one in running if one.done()]:
            yield running.pop(submitted), None
        time.sleep(POLL_SECONDS)


class JobTask:
    """A run as one task of a job, where SIGTERM lets it save; a requeued job continues it."""

    def __init__(self, job: Job, program: Sequence[str], logs: Path) -> None:
        self.job, self.program, self.logs = job, program, logs
        self._stop, self._running = Interruption(), list[subprocess.Popen[bytes]]()

    def __call__(self) -> str | None:
        """Return why the run failed, if it did."""
        with catch_interruption() as self._stop:
            return run_job(self.job, self.program, self.logs, self._stop, rank_environment(), self._running)

    def checkpoint(self) -> Any:
        """Let the running command save, and return what the requeued job does; submitit calls it in the first task."""
        from submitit.helpers import DelayedSubmission

        self._stop.signal_name = "requeue"
        for process in self._running:
            _wait(process, self._stop)
        return DelayedSubmission(JobTask(self.job, self.program, self.logs))
