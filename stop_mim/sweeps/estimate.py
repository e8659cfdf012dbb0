"""How long a sweep will take, from a measured rate: of its own runs, or of a few steps of its baseline."""

import io
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from stop_mim.sweeps.outcome import read_outcome
from stop_mim.sweeps.plan import Job, Plan
from stop_mim.training.config import LogConfig, TrainConfig
from stop_mim.training.distributed import choose_device
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import RunFolder, read_metrics

TIMED_STEPS = 30
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Rate:
    """Images a second of one run, seconds of its probes if they are known, and where both come from."""

    images_per_second: float
    probe_seconds: float | None
    origin: str


def measured_rate(jobs: Sequence[Job]) -> Rate | None:
    """The rate of the runs that the sweep's folder holds already, finished or not."""
    metrics = [read_metrics(job.folder) for job in jobs]
    rates = [statistics.median(line["images_per_second"] for line in lines) for lines in metrics if lines]
    if not rates:
        return None
    outcomes = [read_outcome(job.folder) for job in jobs]
    probes = [one.probe_seconds for one in outcomes if one is not None and one.probe_seconds is not None]
    origin = f"median of {len(rates)} run{'s' if len(rates) > 1 else ''} in {jobs[0].folder.parent.parent}"
    return Rate(statistics.median(rates), statistics.median(probes) if probes else None, origin)


def can_be_timed(plan: Plan, device: torch.device) -> bool:
    """Whether a few steps are cheap: on drawn scenes anywhere, on small images on a GPU."""
    return plan.scale == "demo" or (plan.scale == "tiny-imagenet" and device.type == "cuda" and bool(plan.base.data))


def timed_rate(config: TrainConfig) -> Rate:
    """The rate of a few steps in a folder that is thrown away."""
    device = choose_device(config.speed.device)
    log = LogConfig(every_steps=WARMUP_STEPS, health_every_steps=10**9, tensorboard=False)
    with tempfile.TemporaryDirectory() as folder:
        short = replace(config, out=str(Path(folder) / "run"), stop_after_steps=TIMED_STEPS, log=log)
        result = train(short, console=Console(file=io.StringIO()))
        lines = read_metrics(result.folder)
    # The first lines have the warming up in them, the last one has the health signs.
    rate = lines[min(2, len(lines) - 1)]["images_per_second"]
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"threads of the CPU: {torch.get_num_threads()}"
    )
    return Rate(rate, None, f"a few steps of the baseline alone just now, {name}")


def images_left(jobs: Sequence[Job], n_images: int) -> int:
    """Images that unfinished runs have yet to see."""
    return sum(max(0, steps_of(job, n_images) - steps_done(job)) * job.config.optim.batch_size for job in jobs)


def steps_of(job: Job, n_images: int) -> int:
    """Steps of a whole run."""
    return job.config.optim.epochs * (n_images // job.config.optim.batch_size)


def steps_done(job: Job) -> int:
    """Steps of a run so far, by its newest complete line of metrics."""
    file = RunFolder(job.folder).metrics_file
    if not file.exists():
        return 0
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 8192))
        lines = [line for line in stream.read().split(b"\n")[:-1] if line.startswith(b'{"step": ')]
    return int(lines[-1].removeprefix(b'{"step": ').partition(b",")[0]) if lines else 0


def seconds_left(rate: Rate, jobs: Sequence[Job], n_images: int, at_once: int) -> float:
    """Of all runs that are not over, so many of them at once, each at that rate."""
    training = images_left(jobs, n_images) / rate.images_per_second
    return (training + len(jobs) * (rate.probe_seconds or 0.0)) / min(at_once, max(1, len(jobs)))


def in_words(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
