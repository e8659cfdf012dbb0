"""Watches the processes of a run: each records its place, so that one that is stuck or has ended can be named."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from stop_mim.errors import ProcessLost

SECONDS_BETWEEN_BEATS = 1.0
# Parts of the errors of gloo and NCCL when the other end of a connection is gone.
LOST = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "NCCL")


class Place(NamedTuple):
    """The place of a process in the run."""

    marks: int
    """Number of places that it has passed."""
    where: str
    seconds: float
    """Time without progress."""
    beats: int
    """Increases while the process lives."""


class Watch:
    """Ends all processes with one sentence if none of them makes progress, and explains errors of lost connections.

    `tell` is called with the sentence too, in the process that prints it.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] | None = None
        self._rank, self._world_size, self._timeout = 0, 1, 0.0
        self._marks, self._where, self._moved, self._beats = 0, "the start", time.monotonic(), 0
        self._store: dist.TCPStore | None = None
        self._thread: threading.Thread | None = None

    def mark(self, where: str) -> None:
        """Record that this process has reached a place; all processes pass the same places in the same order."""
        self._marks, self._where, self._moved = self._marks + 1, where, time.monotonic()

    def moves(self) -> None:
        """Record progress at the current place."""
        self._moved = time.monotonic()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Record that this process waits for all others."""
        where = self._where
        self.mark(f"{where}, waiting for the others")
        yield
        self.mark(where)

    @contextmanager
    def over(self, rank: int, world_size: int, timeout: float) -> Iterator[None]:
        """Watch this process, unless it is the only one or already watched; `timeout` is in seconds."""
        if world_size == 1 or self._thread is not None:
            yield
            return
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self.mark("the start")
        ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(ended,), name="watch", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            ended.set()
            self._thread.join(2 * SECONDS_BETWEEN_BEATS)
            self._thread = self._store = self.tell = None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise ProcessLost instead of an error that means that another process has ended."""
        try:
            yield
        except RuntimeError as error:
            if self._thread is None or not is_lost(error):
                raise
            places, silent = self._look()
            what = describe(silent, places, silent) if silent else "another process of this run has ended"
            message = f"The connection was lost: {what}; 'resume' continues from the last checkpoint."
            raise ProcessLost(message) from None

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(SECONDS_BETWEEN_BEATS):
            self._publish()
            if self._ask(lambda store: store.check([_key("over")])):
                self._end()
            if time.monotonic() - self._moved > self._timeout:
                self._judge()

    def _ask(self, question: Callable[[dist.TCPStore], Any]) -> Any:
        """Return the answer of the processes' store; None if it cannot be reached: then processes cannot be named."""
        try:
            if self._store is None:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                wait = timedelta(seconds=5)
                self._store = dist.TCPStore(*address, is_master=False, timeout=wait, wait_for_workers=False)
            return question(self._store)
        except (KeyError, RuntimeError):
            self._store = None
            return None

    def _publish(self) -> None:
        self._beats += 1
        place = Place(self._marks, self._where, time.monotonic() - self._moved, self._beats)
        self._ask(lambda store: store.set(_key(self._rank), json.dumps(place)))

    def _places(self) -> dict[int, Place]:
        def read(store: dist.TCPStore) -> dict[int, Place]:
            known = [rank for rank in range(self._world_size) if store.check([_key(rank)])]
            return {rank: Place(*json.loads(store.get(_key(rank)))) for rank in known}

        return self._ask(read) or {}

    def _look(self) -> tuple[dict[int, Place], set[int]]:
        """Return the places of all processes, and which of the others no longer send beats."""
        before = self._places()
        for _ in range(3):
            time.sleep(SECONDS_BETWEEN_BEATS)
            self._publish()
        now = self._places()
        alive = {rank for rank, place in now.items() if rank not in before or place.beats > before[rank].beats}
        return now, set(range(self._world_size)) - alive - {self._rank}

    def _judge(self) -> None:
        """End all processes unless one makes progress; the first one that is not stuck prints why."""
        places, silent = self._look()
        if any(place.seconds < self._timeout for rank, place in places.items() if rank not in silent):
            return
        named = silent or last_of(places)
        if self._rank != min((rank for rank in places if rank not in named), default=self._rank):
            return
        sentence = (
            f"No process has made progress for {self._timeout:.0f} s: {describe(named, places, silent)}. All processes end; "
            "--speed.timeout-minutes sets how long they wait, and 'resume' continues a run from its last checkpoint."
        )
        print(f"stop-mim: {sentence}", file=sys.stderr, flush=True)
        if self.tell is not None:
            self.tell(sentence)
        self._ask(lambda store: store.set(_key("over"), ""))
        self._end()

    def _end(self) -> None:
        # The process with the store must end last: the others read the end of the run from it.
        time.sleep((4 if self._rank == 0 else 2) * SECONDS_BETWEEN_BEATS)
        os._exit(1)


watch = Watch()
"""The watch of this process."""


def _key(name: object) -> str:
    # Processes that torchrun starts again share the store of the first ones.
    return f"stop-mim/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that another process has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST)


def last_of(places: Mapping[int, Place]) -> set[int]:
    """Return the processes that are behind the others; none if all are at the same place."""
    marks = {rank: place.marks for rank, place in places.items()}
    behind = {rank for rank in marks if marks[rank] == min(marks.values())}
    return behind if len(behind) < len(marks) else set()


def describe(named: set[int], places: Mapping[int, Place], silent: set[int]) -> str:
    """Describe which processes block the others, and where they are."""
    if not named:
        where = f" at {places[min(places)].where}" if places else ""
        return f"all processes are stuck{where}"
    texts = []
    for rank in sorted(named)[:4]:
        state = "does not respond" if rank in silent else "is stuck"
        where = f"{', last seen' if rank in silent else ''} at {places[rank].where}" if rank in places else ""
        texts.append(f"process {rank} {state}{where}")
    return ", ".join(texts) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
