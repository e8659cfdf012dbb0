"""Runs so small that they end within a second: their config, data and checkpoints, trained in one process or in several."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from rich.console import Console

from stop_mim.models.build import build_objective
from stop_mim.training import step as step_module
from stop_mim.training.checkpoint import Checkpoint, checkpoint_path, read_checkpoint
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    OptimConfig,
    PositionsConfig,
    PredictorConfig,
    SpeedConfig,
    TrainConfig,
)
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics

CPU = torch.device("cpu")
TOTAL, MID_EPOCH = 21, 10
STRONG = PositionsConfig(sigma=2.0)


def tiny_config(data="scenes:count=56,size=32", out=None, **groups):
    """Seven steps an epoch, with gradients accumulated over two batches; three epochs."""
    config = TrainConfig(
        data=str(data),
        out=None if out is None else str(out),
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
        predictor=PredictorConfig(width=16, depth=1, heads=2),
        optim=OptimConfig(epochs=3, batch_size=8, warmup_epochs=1.0, lr=2e-3, start_lr=5e-4, ema_start=0.9),
        speed=SpeedConfig(device="cpu", batch_size_per_device=4, workers=0),
        log=LogConfig(every_steps=1, health_every_steps=5, tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=4),
    )
    return replace(config, **groups)


def tiny_objective(seed=0, **groups):
    torch.manual_seed(seed)
    return build_objective(tiny_config(**groups))


def write_images(folder, count=56, sizes=((36, 36),)):
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        height, width = sizes[number % len(sizes)]
        PIL.Image.fromarray(coarse).resize((width, height)).save(folder / f"{number:03d}.png")
    return folder


COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40)}


def write_colours(folder, splits=(("train", 12), ("test", 4)), sizes=((36, 36),)):
    """A labelled dataset whose classes are colours: any encoder tells them apart, trained or not."""
    random = np.random.default_rng(0)
    for split, per_class in splits:
        for name, colour in COLOURS.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(per_class):
                noisy = np.clip(random.normal(colour, 30, (6, 6, 3)), 0, 255).astype(np.uint8)
                height, width = sizes[number % len(sizes)]
                image = PIL.Image.fromarray(noisy).resize((width, height))
                image.save(folder / split / name / f"{number:03d}.png")
    return folder


def checkpoint_at(folder, step) -> Checkpoint:
    return read_checkpoint(checkpoint_path(Path(folder) / "checkpoints", step))


def assert_same_checkpoint(one: Checkpoint, other: Checkpoint) -> None:
    """Bit for bit: weights, target, optimiser and counters."""
    assert one.step == other.step
    assert one.state == other.state
    assert one.tensors.keys() == other.tensors.keys()
    kinds = {".".join(name.split(".")[:2]) for name in one.tensors}
    assert {"model.encoder", "optimiser.exp_avg", "optimiser.step"} <= kinds
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def quietly(function, *arguments, **options):
    """The result of a run, and everything that it would have shown on a screen."""
    console = Console(file=io.StringIO(), width=200)
    return function(*arguments, console=console, **options), console.file.getvalue()


def run(config):
    return quietly(train, config)[0]


def go_on(path, **options):
    return quietly(resume, path, **options)[0]


def train_in(folder, config, resumes=False, shard_images=None, processes_on_host=None):
    """Train a new run, or continue one, in this process of several."""
    if processes_on_host is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(processes_on_host)
    if shard_images is not None:
        step_module.SHARD_IMAGES = shard_images
    if resumes:
        return go_on(folder, speed=config.speed, stop_after_steps=config.stop_after_steps)
    return run(replace(config, out=str(folder)))


def comparable(folder):
    """What was measured at each step, but for the speed."""
    return [
        {name: value for name, value in line.items() if name != "images_per_second"} for line in read_metrics(folder)
    ]
