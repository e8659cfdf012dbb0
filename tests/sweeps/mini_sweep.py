"""A sweep so small that each of its runs ends within seconds."""

import io

from rich.console import Console

from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.grid import SWEEPS, Sweep, Variant
from stop_mim.sweeps.probe import Probe
from stop_mim.sweeps.scales import SCALES, Scale
from stop_mim.training.config import SpeedConfig

VARIANTS = (
    Variant("fixed", {"positions.kind": "sincos"}),
    Variant("noisy", {"positions.kind": "stochastic", "positions.sigma": 1.0}),
)
MINI = Sweep("mini", "fixed and noisy positions", "fixed", VARIANTS)
MINI_SCALE = Scale(
    "demo",
    "seconds",
    "demo",
    {
        "data": "scenes:count=32,size=32",
        "encoder.image_size": (32, 32),
        "encoder.width": 24,
        "predictor.width": 16,
        "predictor.depth": 1,
        "optim.epochs": 10,
        "optim.batch_size": 8,
        "optim.warmup_epochs": 1.0,
        "log.every_steps": 1,
        "log.tensorboard": False,
        "checkpoint.every_steps": 7,
    },
    Probe("scenes", "scenes:count=48,size=32", "scenes:count=200,size=32"),
    ("count/linear/top1", "distance/linear/top1"),
)
STEPS = 40


def install(monkeypatch):
    """Make it known under the name mini, in the place of the demo's scale."""
    monkeypatch.setitem(SWEEPS, "mini", MINI)
    monkeypatch.setitem(SCALES, "demo", MINI_SCALE)


def mini_config(out, **fields):
    return SweepConfig(**{"out": out, "seeds": (0, 1), "speed": SpeedConfig(device="cpu", workers=0), **fields})


def silent():
    return Console(file=io.StringIO(), width=160)


def printed(console):
    return console.file.getvalue()
