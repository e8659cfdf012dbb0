"""Work that is done ahead of its use: on another CUDA stream, in a thread, or in worker processes."""

import atexit
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from itertools import count, islice
from multiprocessing import connection, parent_process
from typing import Any, TypeVar, cast

import torch
import torch.multiprocessing
from torch import Tensor

from stop_mim.errors import InputError, first_line

Item = TypeVar("Item")
Request = TypeVar("Request")
Result = TypeVar("Result")


def prefetched(items: Iterator[Item], device: torch.device, depth: int = 0) -> Generator[Item, None, None]:
    """Yield the same items, made on a separate CUDA stream while the consumer's stream works on earlier ones.

    The tensors of an item (in tuples, lists and dataclasses) are handed over to the stream that is current when it is
    taken. With a `depth`, a thread makes that many items before they are asked for.
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
    waiting: deque[Future[tuple[object, torch.cuda.Event | None]]] = deque()
    try:
        while True:
            while maker is not None and len(waiting) <= depth:
                waiting.append(maker.submit(make))
            item, made = waiting.popleft().result() if maker is not None else make()
            if item is end:
                return
            if made is not None:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(made)
                for tensor in _tensors(item):
                    if tensor.is_cuda:
                        # Or its memory would be given to the next item while it is still read.
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


def mapped(
    work: Callable[[Request], Result], requests: Iterable[Request], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """Yield `work(request)` in the order of the requests, computed by processes; with 0 workers by this process.

    At most `ahead` requests are taken before their turn. Each worker has its own pipe and takes every n-th request, so that
    no lock is shared. Ctrl-C and other signals reach the whole process group: workers ignore them, and end when this
    process closes the generator, exits or dies.
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
        yield from _exchange(ours, processes, iter(requests), ahead)
    finally:
        atexit.unregister(end)
        end()


def _exchange(
    pipes: list[connection.Connection], processes: list[Any], requests: Iterator[Any], ahead: int
) -> Iterator[Any]:
    sent = 0
    for number in count():
        for request in islice(requests, ahead + number - sent):
            # A worker that has died is reported when its result is due.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipes[sent % len(pipes)].send(request)
            sent += 1
        if number == sent:
            return
        yield _receive(pipes[number % len(pipes)], processes[number % len(pipes)])


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
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    for other in others:
        other.close()
    torch.set_num_threads(1)
    parent = parent_process()
    ends = [] if parent is None else [parent.sentinel]
    while pipe in connection.wait([pipe, *ends]):
        try:
            request = pipe.recv()
        # The second, if the parent was killed before it had read all answers.
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, work(request))
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (False, error)
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            # What cannot be pickled.
            pipe.send((False, RuntimeError(f"{type(answer[1]).__name__}: {answer[1]} ({error})")))
