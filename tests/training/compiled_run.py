"""Runs that are compiled, in a process of their own: without the checks of shapes, which no compiler can follow.

python compiled_run.py FOLDER DEVICE BACKEND writes what was found to FOLDER/found.pt.
"""

import io
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import torch
from rich.console import Console
from stepping import make_batches
from tiny_run import tiny_config, tiny_objective
from torch._dynamo.utils import counters

from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.config import EncoderConfig, LogConfig, PositionsConfig, SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.pretrain import resume, train
from stop_mim.training.recipes import find_recipe
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import TrainingStep, make_optimiser, read_outcomes

GROUPS = {
    "encoder": EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=32, depth=1, heads=2),
    "positions": PositionsConfig(sigma_start=0.5, sigma=2.0),
    "log": LogConfig(1, 1000, False),
}
RECIPES = ("stop-tiny-imagenet", "ijepa-tiny-imagenet", "stop-mae-tiny-imagenet", "stop-data2vec-tiny-imagenet")
STILL = ScheduledValues(lr=0.0, weight_decay=0.0, ema_momentum=1.0)


def measure(device, compiles):
    """A step without noise, its gradients, and the losses of steps with noise of three seeds."""
    objective = tiny_objective(**GROUPS).to(device)
    optimiser = make_optimiser(objective, tiny_config().optim, device)
    autocast = autocast_for("auto", device)
    step = TrainingStep(objective, objective, optimiser, Ranks(0, 1, 1, device), autocast)
    told = []
    chosen = accelerate(step, SpeedConfig(compile=compiles, graph=False), 10, told.append, told.append)
    moved = ((images.to(device), masks) for images, masks in make_batches(0))
    batches = [(images, type(masks)(masks.context.to(device), masks.targets.to(device))) for images, masks in moved]

    def take(seed):
        return read_outcomes([chosen(batches, STILL, seed)])[0]

    # Not by set_sigma: silent positions would be other code.
    objective.positions.noise_std.zero_()
    outcome = take(0)
    gradients = {name: p.grad.cpu() for name, p in objective.named_parameters() if p.grad is not None}
    with torch.no_grad():
        objective.predictor.projection.weight.mul_(20)
    objective.positions.set_sigma(1.0)
    noisy = [take(seed).loss for seed in (0, 0, 1)]
    return {"loss": outcome.loss, "norm": outcome.gradient_norm, "gradients": gradients, "noisy": noisy, "told": told}


def graph_breaks():
    """Why the compiler breaks the graph of each objective with each kind of noise, where it does."""
    found = {}
    for name in RECIPES:
        kinds = [{}, {"conditioned": True}, {"kind": "jittered"}] if name == RECIPES[0] else [{}]
        for positions in kinds:
            config = find_recipe(name)
            config = replace(
                config,
                encoder=replace(config.encoder, width=32, depth=1, heads=2),
                predictor=replace(config.predictor, width=32, depth=1, heads=2),
                positions=replace(config.positions, **positions),
                objective=replace(config.objective, target_layers=1),
            )
            objective = build_objective(config)
            masks = build_masks(config.masks, objective.encoder.grid).sample(2)
            torch._dynamo.reset()
            told = torch._dynamo.explain(objective)(torch.randn(2, 3, 64, 64), masks, objective.draw_noise(masks))
            if told.graph_count != 1 or told.graph_break_count:
                found[f"{name} {positions}"] = [str(reason.reason) for reason in told.break_reasons]
    return found


def main(folder, device, backend):
    torch.set_num_threads(1)
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=backend)
    found = {"compiled": measure(device, True), "eager": measure(device, False)}
    console = Console(file=io.StringIO(), width=300)
    speed = SpeedConfig(device.type, batch_size_per_device=4, workers=0, compile=True)
    config = tiny_config(out=folder / "whole", speed=speed, **GROUPS)
    train(config, console=console)
    train(replace(config, out=str(folder / "parts"), stop_after_steps=10), console=console)
    resume(folder / "parts", console=console)
    found["counters"] = {name: dict(counters[name]) for name in ("stats", "graph_break")}
    found["breaks"] = graph_breaks() if device.type == "cpu" else {}
    torch.save(found | {"shown": console.file.getvalue()}, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3])
