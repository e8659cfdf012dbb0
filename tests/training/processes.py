"""What several processes of one run do, and what each of them sees."""

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


def train_and_watch(folder, config, mid_epoch, silent):
    """Train the wanted run, whole and in two parts, then the silent ones; write down what this process saw and wrote."""
    import torch

    from stop_mim.models.ijepa import IJEPA
    from stop_mim.training import distributed, pretrain
    from stop_mim.training.config import SpeedConfig
    from stop_mim.training.inputs import StepInputs

    rank = int(os.environ["RANK"])
    seen = {"images": [], "masks": [], "noise": [], "losses": [], "written": []}
    runs = [str(folder / name) for name in ("whole", "parts")]

    def watch(event, arguments):
        written = event in ("os.mkdir", "os.rename", "os.remove")
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            written = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if written and any(str(arguments[0]).startswith(run) for run in runs):
            seen["written"].append(str(arguments[0]))

    def forward(self, images, masks, noise):
        seen["images"].append(images.clone())
        seen["masks"].append(masks.context.clone())
        if noise.masked is not None:
            seen["noise"].append(noise.masked[0, 0, :4].tolist())
        loss = real_forward(self, images, masks, noise)
        seen["losses"].append(loss.item())
        return loss

    def remember(parts, *more):
        result = real_run(parts, *more)
        seen.update(weights=parts.objective.state_dict())
        seen["probes"] = any(getattr(callback, "probe", None) is not None for callback in parts.trainer.callbacks)
        return result

    def open_images(self, *arguments):
        batches = real_open(self, *arguments)
        order = batches.order
        indices = [order.indices(batch) for batch in range(order.batches_per_epoch)]
        seen.update(indices=torch.cat(indices), n_images=len(order.images))
        return batches

    sys.addaudithook(watch)
    real_forward, IJEPA.forward = IJEPA.forward, forward
    real_run, pretrain.run = pretrain.run, remember
    real_open, StepInputs.open_images = StepInputs.open_images, open_images
    with distributed.process_group(SpeedConfig("cpu")) as ranks:
        seen["ranks"] = (ranks.rank, ranks.world_size, ranks.is_main)
        seen["any"] = [distributed.any_rank(rank == 1, ranks), distributed.any_rank(False, ranks)]
        seen["mean"] = distributed.reduce_mean(torch.tensor(float(rank)), ranks).item()
        seen["broadcast"] = distributed.broadcast(f"from {rank}", ranks)
        train_in(runs[0], config)
        torch.save(seen, folder / f"rank{rank}.pt")
        train_in(runs[1], replace(config, stop_after_steps=mid_epoch))
        train_in(runs[1], config, resumes=True)
        for name, one in silent.items():
            train_in(folder / "silent runs" / name, one)
            torch.save(seen["weights"], folder / f"{name}.rank{rank}.pt")
