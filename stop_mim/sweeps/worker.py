"""A process that does one run of a sweep after the other: it reads jobs from its standard input, a line each.

It stops, and saves, when that input ends while it works: its parent is gone then.
"""

import gc
import os
import queue
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TextIO

import torch
from rich.console import Console

from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.sweeps.outcome import Outcome, write_outcome
from stop_mim.sweeps.plan import Job
from stop_mim.sweeps.probe import probe_run
from stop_mim.training.pretrain import TrainResult, resume, train
from stop_mim.training.run_folder import RunFolder, read_metrics

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130


def perform(job: Job, console: Console) -> Outcome | None:
    """Train, or go on, then probe; nothing if it was interrupted."""
    if not _train(job, console).finished:
        return None
    metrics = read_metrics(job.folder)
    health = {name: value for name, value in metrics[-1].items() if name.startswith("health/")}
    rates = [line["images_per_second"] for line in metrics]
    started = time.perf_counter()
    scores = probe_run(job.folder, job.probe, job.config.speed, console)
    return Outcome(
        metrics={**scores, **health},
        steps=int(metrics[-1]["step"]),
        images_per_second=statistics.median(rates),
        probe_seconds=time.perf_counter() - started,
    )


def _train(job: Job, console: Console) -> TrainResult:
    folder = RunFolder(job.folder)
    if folder.config_file.exists():
        _require_own(folder, job)
        return resume(folder.path, speed=job.config.speed, console=console)
    # What is there without a configuration is what a process left that was killed before its first step.
    shutil.rmtree(folder.path, ignore_errors=True)
    return train(job.config, job.recipe, console)


def _require_own(folder: RunFolder, job: Job) -> None:
    """The run in the folder must be the one that is asked for: a sweep may have been moved, but not mixed."""
    wanted, own = job.config, folder.config()
    found = replace(
        own,
        out=wanted.out,
        stop_after_steps=wanted.stop_after_steps,
        speed=wanted.speed,
        log=wanted.log,
        checkpoint=wanted.checkpoint,
    )
    if found != wanted:
        raise InputError(f"{folder.path} holds another run than this sweep's: move it away.")


def attempt(job: Job, console: Console) -> bool | None:
    """Do a job and write down how it ended: whether it went well, or nothing if it was interrupted."""
    console.print(f"== {job.name}: {job.folder}", highlight=False, markup=False, soft_wrap=True)
    try:
        outcome = perform(job, console)
    except Exception as error:
        console.print(traceback.format_exc(), highlight=False, markup=False, soft_wrap=True)
        outcome = Outcome(error=sentence(error))
    if outcome is None:
        return None
    write_outcome(job.folder, outcome)
    return outcome.error is None


def sentence(error: Exception) -> str:
    """Why a run failed, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        first = text.split(". ")[0].rstrip(".") or "no details"
        return f"Out of memory ({first}): lower --side-by-side or --speed.batch-size-per-device."
    return text if isinstance(error, InputError | TrainingDiverged) else f"{type(error).__name__}: {text}"


class Inbox:
    """Jobs from a stream, as they come; the end of the stream interrupts the job that is being done."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stream, self._working = stream, threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._stream:
            self._lines.put(line)
        self._lines.put(None)
        if self._working.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def next_job(self) -> Job | None:
        """Wait for a job; none when there will be no more."""
        self._working.clear()
        line = self._lines.get()
        if line is None:
            return None
        self._working.set()
        return Job.from_line(line)


def own_input() -> TextIO:
    """Standard input for this process alone: what it starts finds an empty one.

    A process that is forked while a thread reads standard input would wait forever for that thread when it closes it, as
    those that read images for a DataLoader do first of all.
    """
    stream = os.fdopen(os.dup(sys.stdin.fileno()), encoding=sys.stdin.encoding)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)
    return stream


def main() -> None:
    """Do jobs until there are no more; after one that failed, end: the next gets a fresh process."""
    inbox, console = Inbox(own_input()), Console(file=sys.stdout, width=120)
    while (job := inbox.next_job()) is not None:
        went_well = attempt(job, console)
        # Or what was compiled for one run would count against the next one's limit, and its graph keep memory.
        torch.compiler.reset()
        gc.collect()
        if went_well is None:
            sys.exit(EXIT_INTERRUPTED)
        if not went_well:
            sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
