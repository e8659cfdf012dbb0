"""Options of a sweep with two variants and two seeds in the directory "out"."""

from pathlib import Path

from stop_mim.sweeps.plan import SweepConfig


def mini_config(**fields):
    return SweepConfig(**{"scale": "mini", "out": Path("out"), "seeds": (0, 1), **fields})
