"""Work done ahead of its use: on another CUDA stream, in a thread, or in worker processes."""

import atexit
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from itertools import count, cycle
from multiprocessing import connection, parent_process
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.multiprocessing
from jaxtyping import Int, UInt8
from torch import Tensor

from stop_mim.data.order import BLOCKS_AHEAD, Request
from stop_mim.errors import InputError, first_line
from stop_mim.interruption import ALWAYS, UNLESS_HANDLED

# Batches whose blocks are fetched before they are read.
_FETCHED_AHEAD = 32

Item = TypeVar("Item")
Work = TypeVar("Work")
Result = TypeVar("Result")


def taken_ahead(items: Iterable[Item], depth: int) -> Iterator[Item]:
    """Yield the same items, each after `depth` later ones were taken: what taking an item starts has that long to finish."""
    taken: deque[Item] = deque()
    for item in items:
        taken.append(item)
        if len(taken) > depth:
            yield taken.popleft()
    yield from taken


def prefetched(items: Iterator[Item], device: torch.device, depth: int = 0) -> Generator[Item, None, None]:
    """Yield the same items, made on a separate CUDA stream while the consumer's stream works on earlier ones.

    The tensors of an item (in tuples, lists and dataclasses) are handed over to the stream that is current when it is
    taken. With a `depth`, a thread makes up to that many items ahead.
    """
    if device.type != "cuda" and not depth:
        yield from items
        return
    end = object()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))

    def make() -> tuple[object, torch.cuda.Event | None]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            item = next(items, end)
            return item, None if stream is None else stream.record_event()

    maker = ThreadPoolExecutor(1) if depth else None
    results = (make if maker is None else maker.submit(make).result for _ in count())
    try:
        for result in taken_ahead(results, depth):
            item, made = result()
            if item is end:
                return
            if made is not None:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(made)
                for tensor in _tensors(item):
                    if tensor.is_cuda:
                        # Otherwise its memory could be given to the next item while it is still read.
                        tensor.record_stream(consumer)
            yield cast(Item, item)
    finally:
        if maker is not None:
            maker.shutdown(cancel_futures=True)
        if isinstance(items, Generator):
            items.close()


def _tensors(item: object) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, tuple | list):
        for part in item:
            yield from _tensors(part)
    elif is_dataclass(item):
        for field in fields(item):
            yield from _tensors(getattr(item, field.name))


def fetched(
    requests: Iterable[Request], fetch: Callable[[int], object], ends: Int[np.ndarray, " blocks"]
) -> Generator[Request, None, None]:
    """Yield requests whose blocks have been fetched; a thread fetches the blocks of later requests.

    `fetch` fetches a block by its number, and `ends` has the end of each block. `taken_ahead` cannot do this: it takes an
    item, which starts its work, before it knows whether there is room.
    """
    waiting: deque[tuple[Request, set[int], list[Future[object]]]] = deque()

    def first() -> Request:
        request, _, fetches = waiting.popleft()
        for one in fetches:
            one.result()
        return request

    fetcher = ThreadPoolExecutor(1, "fetch")
    try:
        for request in requests:
            blocks = set(np.searchsorted(ends, request.indices.numpy(), side="right").tolist())
            # Waiting requests must not need more blocks than the cache keeps.
            while waiting and len(blocks.union(*(one for _, one, _ in waiting))) > BLOCKS_AHEAD:
                yield first()
            waiting.append((request, blocks, [fetcher.submit(fetch, block) for block in sorted(blocks)]))
            if len(waiting) > _FETCHED_AHEAD:
                yield first()
        while waiting:
            yield first()
    finally:
        fetcher.shutdown(cancel_futures=True)


class Slots:
    """A ring of (parts of) batches in page-locked memory, from which they are copied to the device in the background.

    Workers fill shared slots: new shared memory for every batch would cost them as much as resizing the images.
    """

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device, shared: bool) -> None:
        pixels = torch.empty(count, *shape, dtype=torch.uint8)
        self.pixels = pixels.share_memory_() if shared else pixels
        self.device = device
        self._locked = False
        self._copied: list[torch.cuda.Event | None] = [None] * count
        if device.type == "cuda":
            # Page-locked memory is copied to the GPU in the background; if locking fails, copies only take longer.
            refusal = torch.cuda.cudart().cudaHostRegister(self.pixels.data_ptr(), self.pixels.numel(), 0)
            self._locked = int(refusal) == 0
            if not self._locked:
                # CUDA keeps the error, and the next kernel launch would report it.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)

    def close(self) -> None:
        """Unlock the memory."""
        if self._locked:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.pixels.data_ptr())

    def copy(self, slot: int, target: UInt8[Tensor, "n _ _ _"]) -> None:
        """Copy the images of a slot to the device."""
        target.copy_(self.pixels[slot, : len(target)], non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
            self._copied[slot] = copied

    def next(self, number: int) -> int:
        """Return the slot of the piece of that number, once it may be filled again."""
        slot = number % len(self._copied)
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        return slot


def mapped(
    work: Callable[[Work], Result], requests: Iterable[Work], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """Yield `work(request)` in the order of the requests, computed by processes; with 0 workers by this process.

    At most `ahead` requests are sent before their results are needed. Each worker has its own pipe and takes every n-th
    request, so that no lock is shared. Ctrl-C and other signals reach the whole process group: workers ignore them, and end
    when this process closes the generator, exits or dies.
    """
    if not workers:
        yield from map(work, requests)
        return
    context = torch.multiprocessing.get_context()
    pipes = [context.Pipe() for _ in range(workers)]
    ours = [pipe for pipe, _ in pipes]
    processes = [context.Process(target=_serve, args=(work, theirs, ours), daemon=True) for _, theirs in pipes]

    def end() -> None:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()

    # Before multiprocessing's own function, which would wait for the workers to end by themselves.
    atexit.register(end)
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        for pipe, process in taken_ahead(_sent(requests, list(zip(ours, processes, strict=True))), ahead - 1):
            yield _receive(pipe, process)
    finally:
        atexit.unregister(end)
        end()


def _sent(requests: Iterable[Any], workers: list[tuple[connection.Connection, Any]]) -> Iterator[Any]:
    """Send each request to the next worker; yield the worker."""
    for request, (pipe, process) in zip(requests, cycle(workers), strict=False):
        # A worker that has died is reported when its result is due.
        with suppress(BrokenPipeError, ConnectionResetError):
            pipe.send(request)
        yield pipe, process


def _receive(pipe: connection.Connection, process: Any) -> Any:
    connection.wait([pipe, process.sentinel])
    try:
        ok, result = pipe.recv() if pipe.poll() else (False, None)
    except (EOFError, ConnectionResetError):
        ok, result = False, None
    if ok:
        return result
    if result is None:
        process.join()
        how = f"by signal {-process.exitcode}" if process.exitcode < 0 else f"with exit code {process.exitcode}"
        raise InputError(
            f"A worker process that decodes images ended {how}: the machine may be out of memory; set --speed.workers to "
            "a smaller number."
        )
    if isinstance(result, InputError | OSError):
        raise result
    raise InputError(
        f"A worker process failed while it read images ({type(result).__name__}: {first_line(result)}): check the data, or "
        "set --speed.workers to 0 to see where."
    ) from result


def _serve(work: Callable[[Any], Any], pipe: connection.Connection, others: list[connection.Connection]) -> None:
    for number in (*ALWAYS, *UNLESS_HANDLED):
        signal.signal(number, signal.SIG_IGN)
    for other in others:
        other.close()
    torch.set_num_threads(1)
    parent = parent_process()
    ends = [] if parent is None else [parent.sentinel]
    while pipe in connection.wait([pipe, *ends]):
        try:
            request = pipe.recv()
        # ConnectionResetError: the parent was killed before it had read all answers.
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, work(request))
        except Exception as error:
            answer = (False, _portable(error))
            answer[1].add_note(traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _portable(error: Exception) -> Exception:
    """Return the error, or one with the same message if the error cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return (
            InputError(str(error))
            if isinstance(error, InputError)
            else RuntimeError(f"{type(error).__name__}: {error}")
        )
    return error
