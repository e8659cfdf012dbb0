"""Watches the processes of a run: each tells where it stands, so that one that is stuck or has ended can be named."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from stop_mim.errors import ProcessLost
from stop_mim.training.distributed import Ranks

SECONDS_BETWEEN_BEATS = 1.0
# What gloo and NCCL say when the other end of a connection is gone.
LOST = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "NCCL")


class Place(NamedTuple):
    """Where a process stands."""

    marks: int
    """How many places it has passed."""
    where: str
    seconds: float
    """How long it has been there."""
    beats: int
    """Counts up while the process lives."""


class Watch:
    """Ends this process with a sentence if it has waited for too long, and explains errors of lost connections.

    Args:
        ranks: this process among all; one that is alone is not watched.
        timeout: seconds without a new mark after which all processes end.
        tell: also gets the sentence, in the process that prints it.
    """

    def __init__(self, ranks: Ranks, timeout: float = 300.0, tell: Callable[[str], None] | None = None) -> None:
        self.ranks, self.timeout, self.tell = ranks, timeout, tell
        self._place = (0, "the start", time.monotonic())
        self._beats, self._over = 0, threading.Event()
        self._store: dist.TCPStore | None = None
        self._thread: threading.Thread | None = None

    def mark(self, where: str) -> None:
        """Note that this process gets to a place; all processes pass the same places in the same order."""
        self._place = (self._place[0] + 1, where, time.monotonic())

    def __enter__(self) -> "Watch":
        if self.ranks.world_size > 1:
            self.mark(self._place[1])
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * SECONDS_BETWEEN_BEATS)

    def _watch(self) -> None:
        self._publish()
        while not self._over.wait(SECONDS_BETWEEN_BEATS):
            self._publish()
            if time.monotonic() - self._place[2] > self.timeout:
                self._end()

    def _publish(self) -> None:
        marks, where, since = self._place
        self._beats += 1
        place = Place(marks, where, time.monotonic() - since, self._beats)
        try:
            if self._store is None:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                wait = timedelta(seconds=5)
                self._store = dist.TCPStore(*address, is_master=False, timeout=wait, wait_for_workers=False)
            self._store.set(f"stop-mim/place/{self.ranks.rank}", json.dumps(place))
        except (KeyError, RuntimeError):
            # Without it, processes cannot be named.
            self._store = None

    def _places(self) -> dict[int, Place]:
        found: dict[int, Place] = {}
        for rank in range(self.ranks.world_size):
            try:
                if self._store is not None and self._store.check([key := f"stop-mim/place/{rank}"]):
                    found[rank] = Place(*json.loads(self._store.get(key)))
            except RuntimeError:
                break
        return found

    def _look(self) -> tuple[dict[int, Place], set[int]]:
        """Return where all processes stand, and which of them do not move their beats any more."""
        before = self._places()
        for _ in range(3):
            time.sleep(SECONDS_BETWEEN_BEATS)
            self._publish()
        now = self._places()
        alive = {rank for rank, place in now.items() if rank not in before or place.beats > before[rank].beats}
        return now, {rank for rank in range(self.ranks.world_size) if rank not in alive}

    def _end(self) -> None:
        places, silent = self._look()
        named = silent or last_of(places)
        speaks = min((rank for rank in places if rank not in named), default=min(places, default=0))
        if self.ranks.rank == speaks:
            sentence = (
                f"No step for {self.timeout:.0f} s: {describe(named, places, silent)}. All processes end; 'resume' "
                "continues from the last checkpoint, and speed.timeout-minutes sets how long they wait."
            )
            print(f"stop-mim: {sentence}", file=sys.stderr, flush=True)
            if self.tell is not None:
                self.tell(sentence)
        else:
            # The others end this process once one of them has ended: the sentence comes first.
            time.sleep(2 * SECONDS_BETWEEN_BEATS)
        os._exit(1)

    def explained(self, error: BaseException) -> BaseException:
        """Return the error, or ProcessLost if it says that another process is gone."""
        if self.ranks.world_size == 1 or not is_lost(error):
            return error
        places, silent = self._look()
        named = silent - {self.ranks.rank}
        whom = describe(named, places, silent) if named else "another process of this run has ended"
        return ProcessLost(f"The connection was lost: {whom}; 'resume' continues from the last checkpoint.")


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that another process is gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST)


def last_of(places: Mapping[int, Place]) -> set[int]:
    """Return the processes that are behind the others; none if all stand at the same place."""
    marks = {rank: place.marks for rank, place in places.items()}
    behind = {rank for rank in marks if marks[rank] == min(marks.values())}
    return behind if len(behind) < len(marks) else set()


def describe(named: set[int], places: Mapping[int, Place], silent: set[int]) -> str:
    """Return which processes hold up the others, and where they stand."""
    if not named:
        return "all processes wait for one another"
    texts = []
    for rank in sorted(named)[:4]:
        state = "gives no sign of life" if rank in silent else "is stuck"
        where = f"{', last seen' if rank in silent else ''} at {places[rank].where}" if rank in places else ""
        texts.append(f"process {rank} {state}{where}")
    return ", ".join(texts) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
