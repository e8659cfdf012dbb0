"""What several processes of one run do."""

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console


def train_in(folder, config, resumes=False, shard_images=None, processes_on_host=None):
    """Train a new run, or continue one, in this process of several."""
    from stop_mim.training import pretrain, step

    if processes_on_host is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(processes_on_host)
    if shard_images is not None:
        step.SHARD_IMAGES = shard_images
    quiet = Console(file=io.StringIO())
    if resumes:
        return pretrain.resume(
            Path(folder), speed=config.speed, stop_after_steps=config.stop_after_steps, console=quiet
        )
    return pretrain.train(replace(config, out=str(folder)), console=quiet)


def train_and_look(folder, config, mid_epoch, others):
    """Train a run, whole and in two parts, then the others; note what this process writes, and its last weights."""
    import torch

    from stop_mim.training import distributed, pretrain
    from stop_mim.training.config import SpeedConfig

    rank = int(os.environ["RANK"])
    runs, seen = [str(folder / name) for name in ("whole", "parts")], {"written": []}

    def look(event, arguments):
        written = event in ("os.mkdir", "os.rename", "os.remove")
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            written = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if written and str(arguments[0]).startswith(tuple(runs)):
            seen["written"].append(Path(arguments[0]).name)

    def remember(parts, *more):
        seen["weights"] = parts.objective.state_dict()
        return real_run(parts, *more)

    sys.addaudithook(look)
    real_run, pretrain.run = pretrain.run, remember
    with distributed.process_group(SpeedConfig("cpu")) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (rank, 2, rank == 0)
        assert [distributed.any_rank(rank == 1, ranks), distributed.any_rank(False, ranks)] == [True, False]
        assert distributed.reduce_mean(torch.tensor(float(rank)), ranks).item() == 0.5
        assert distributed.broadcast(f"from {rank}", ranks) == "from 0"
        train_in(runs[0], config)
        torch.save(seen, folder / f"whole.rank{rank}.pt")
        train_in(runs[1], replace(config, stop_after_steps=mid_epoch))
        train_in(runs[1], config, resumes=True)
        for name, one in others.items():
            train_in(folder / name, one)
            torch.save(seen, folder / f"{name}.rank{rank}.pt")
