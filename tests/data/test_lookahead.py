"""Work that is done ahead: the same items in the same order, errors at their place, and an early end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import count, islice

import pytest
import torch

from stop_mim.data.lookahead import mapped, prefetched
from stop_mim.errors import InputError, MissingExtra

CPU = torch.device("cpu")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_keep_their_order_and_errors_their_place(depth):
    def items():
        yield from range(5)
        raise KeyError("five")

    found = prefetched(items(), CPU, depth)
    assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="five"):
        next(found)
    assert list(prefetched(iter(range(3)), CPU, depth)) == [0, 1, 2]


def test_a_thread_makes_so_many_items_ahead_and_ends_with_them():
    made, closed, before = [], [], set(threading.enumerate())

    def items():
        try:
            for number in count():
                made.append(number)
                yield number
        finally:
            closed.append(True)

    ahead = prefetched(items(), CPU, 2)
    assert next(ahead) == 0
    deadline = time.monotonic() + 30
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    ahead.close()
    assert closed
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_keep_the_order_and_take_so_many_requests_ahead(workers):
    taken = []

    def requests():
        for number in range(20):
            taken.append(number)
            yield number

    results = mapped(lambda number: (number, number**2), requests(), workers, ahead=5)
    assert next(results) == (0, 0)
    assert len(taken) == (5 if workers else 1)
    assert list(results) == [(number, number**2) for number in range(1, 20)]
    assert not list(mapped(abs, [], workers, ahead=5))


PROGRAM = """
import sys
from stop_mim.data.lookahead import mapped
results = mapped(abs, range(99), workers=2, ahead=8)
next(results)
sys.exit(3)
"""


def test_a_program_that_closes_nothing_ends_with_its_workers():
    """A new interpreter: what could hang is its exit."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3, ended.stderr


def test_workers_ignore_signals_and_end_in_silence_with_a_parent_that_is_killed(capfd):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            results = mapped(abs, range(9), workers=2, ahead=5)
            # One result of each worker: both have started.
            next(results), next(results)
            workers = multiprocessing.active_children()
            # Ctrl-C and SIGTERM reach the workers too: the main process decides.
            for worker in workers:
                os.kill(worker.pid, signal.SIGTERM)
                os.kill(worker.pid, signal.SIGINT)
            time.sleep(0.2)
            os.write(writer, b"%d" % sum(worker.is_alive() for worker in workers))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"2"
    # The pipe ends when the workers, which have inherited it, have ended.
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert capfd.readouterr().err == ""


def open_shards():
    # An exception that cannot be unpickled from its message alone.
    raise MissingExtra("wds: shards", "braceexpand", "wds")


@pytest.mark.parametrize(
    ("break_down", "message"),
    [
        (lambda: [][1], "IndexError: list index out of range"),
        (lambda: open_shards(), r"wds: shards needs the package 'braceexpand'"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "by signal 9"),
        (lambda: os._exit(3), "with exit code 3"),
    ],
)
def test_a_worker_that_fails_or_dies_is_one_sentence(break_down, message):
    with pytest.raises(InputError, match=message) as error:
        list(mapped(lambda number: break_down() if number == 3 else number, range(7), workers=2, ahead=4))
    assert "\n" not in str(error.value)


@dataclass
class Item:
    images: list[torch.Tensor]
    number: int


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 2])
def test_items_are_handed_over_between_streams(depth):
    gpu = torch.device("cuda", 0)

    def items():
        for number in count():
            # Long enough that a consumer that did not wait would read what was there before.
            values = torch.randn(1000, 1000, device=gpu)
            for _ in range(20):
                values = (values @ values).clamp(-1, 1)
            yield Item([values.mul_(0).add_(number)], number)

    sums = [item.images[0].sum() / 1e6 for item in islice(prefetched(items(), gpu, depth), 30)]
    assert torch.stack(sums).tolist() == list(range(30))
