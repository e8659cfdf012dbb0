"""Runs so small that a measurement takes no time."""

from dataclasses import replace

import pytest

from stop_mim.benchmark import timing
from stop_mim.benchmark.config import BenchConfig
from stop_mim.training.config import MaskConfig, ObjectiveConfig, OptimConfig, SpeedConfig

MASKS = {"ijepa": "multiblock", "mae": "random", "data2vec": "blockwise"}


@pytest.fixture(autouse=True)
def _small_ceiling(monkeypatch):
    monkeypatch.setattr(timing, "SIDE_ON_CPU", 64)


@pytest.fixture
def tiny(two_steps):
    """A configuration by its objective, with two batches per step."""

    def make(kind="ijepa", **groups):
        config = replace(
            two_steps,
            data="scenes:count=24,size=32",
            objective=ObjectiveConfig(kind=kind),
            masks=MaskConfig(kind=MASKS[kind]),
            optim=OptimConfig(epochs=2, batch_size=8, warmup_epochs=1.0),
            speed=SpeedConfig(device="cpu", batch_size_per_device=4, workers=0),
        )
        return replace(config, **groups)

    return make


@pytest.fixture
def short():
    """As few measurements as possible."""
    return BenchConfig(images="synthetic", repeats=2, steps=2, warmup=1)
