"""Several processes on the CPU, as torchrun starts them; torch is imported once for all of them."""

import multiprocessing
import os
import socket
import traceback

TIMEOUT = 120

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["stop_mim.evaluation.evaluate", "stop_mim.training.pretrain", "tiny_run"])


def run_ranks(count, function, *arguments, timeout=TIMEOUT, fails=False):
    """Call a function of a module in so many processes; return their exit codes, and their errors if it is to fail."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    failures = _context.SimpleQueue()
    processes = [
        _context.Process(target=_rank, args=(rank, count, port, dict(os.environ), failures, function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    told = []
    while not failures.empty():
        told.append(failures.get())
    assert fails or not told, "\n".join(told)
    codes = [process.exitcode for process in processes]
    return (codes, told) if fails else codes


def _rank(rank, count, port, environment, failures, function, arguments):
    import torch

    torch.set_num_threads(1)
    # A child of the fork server would start its own workers by another server.
    multiprocessing.set_start_method("fork", force=True)
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    try:
        function(*arguments)
    except BaseException:
        failures.put(traceback.format_exc())
        raise
