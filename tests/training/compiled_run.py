"""Runs with and without compilation, in a process of their own: without the checks of shapes, which no compiler can follow.

python compiled_run.py FOLDER DEVICE BACKEND writes what was found to FOLDER/found.json.
"""

import io
import json
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import torch
from rich.console import Console
from tiny_run import tiny_config
from torch._dynamo.utils import counters

from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, LogConfig, PositionsConfig, SpeedConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.recipes import find_recipe

STEPS = 6
RECIPES = ("stop-tiny-imagenet", "ijepa-tiny-imagenet", "stop-mae-tiny-imagenet", "stop-data2vec-tiny-imagenet")


def graph_breaks():
    """Why the compiler breaks the graph of each objective and each kind of noise, where it does."""
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
    console = Console(file=io.StringIO(), width=300)
    config = tiny_config(
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=32, depth=1, heads=2),
        positions=PositionsConfig(sigma_start=0.5, sigma=2.0),
        log=LogConfig(1, 1000, False),
        speed=SpeedConfig(device, batch_size_per_device=4, workers=0, compile=True),
    )

    def run(name, steps, **changes):
        train(replace(config, out=str(folder / name), stop_after_steps=steps, **changes), console=console)

    run("compiled", STEPS)
    run("parts", STEPS // 2)
    resume(folder / "parts", stop_after_steps=STEPS, console=console)
    found = {name: dict(counters[name]) for name in ("stats", "graph_break")}
    found["breaks"] = graph_breaks() if device == "cpu" else {}
    run("eager", STEPS, speed=replace(config.speed, compile=False))
    (folder / "found.json").write_text(json.dumps(found | {"shown": console.file.getvalue()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
