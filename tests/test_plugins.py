"""From outside the package: a source, a covariance, a task and a sweep, each in one file, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = {
    "my_source": """
import numpy as np
import torch

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import SOURCES, SourceKind


class Noise(ImageSource):
    def __init__(self, count):
        super().__init__(f"noise:{count}", {"class": np.arange(count) % 2}, ("dark", "light"))

    def __len__(self):
        return len(self.labels["class"])

    def read(self, index):
        draws = torch.Generator().manual_seed(index)
        return torch.randint(0, 128, (3, 32, 32), dtype=torch.uint8, generator=draws) + 127 * (index % 2)

    def size(self, index):
        return 32, 32

    def describe(self, index):
        return f"{self.name}#{index}"

    def fingerprint(self):
        return f"{len(self):08x}"


@SOURCES.register("noise")
class NoiseKind(SourceKind):
    help = "noise:COUNT"
    prefix = "noise:"

    @classmethod
    def open(cls, name, split):
        return Noise(int(name.removeprefix(cls.prefix)))
""",
    "my_covariance": '''
import torch
from torch import nn

from stop_mim.positions.covariance import Covariance, covariance


@covariance("scalar")
class Scalar(Covariance):
    """One learned scale for all features."""

    def __init__(self, dim, projection):
        super().__init__()
        self.noise_dim, self.scale = dim, nn.Parameter(torch.tensor(0.5))

    def factor(self):
        return self.scale * torch.eye(self.noise_dim)
''',
    "my_task": '''
from dataclasses import dataclass
from typing import Annotated

from stop_mim.constraints import ABOVE_ZERO, Checked
from stop_mim.evaluation.results import Score
from stop_mim.evaluation.task import TASKS, FeatureTask


@dataclass(frozen=True)
class SpreadOptions(Checked, group="spread"):
    """The spread of features."""

    power: Annotated[float, ABOVE_ZERO] = 1.0
    """Power of the standard deviation."""


@TASKS.register("spread")
class Spread(FeatureTask):
    """Standard deviation of the last layer's test features."""

    help = "standard deviation of the features"
    Options = SpreadOptions

    def scores(self, train, test):
        features = next(iter(self.subject.chunks(test.features.last(1))))
        yield Score("std", features.float().std().item() ** self.options.power, headline=True)
''',
    "my_sweep": '''
from stop_mim.sweeps.grid import SWEEPS, Sweep
from stop_mim.sweeps.scales import SCALES, Scale


@SWEEPS.register("loudness")
def loudness():
    """Two values of sigma."""
    return Sweep("quiet", {"quiet": {"positions.sigma": 0.0}, "loud": {"positions.sigma": 1.0}})


@SCALES.register("seconds")
def seconds():
    """A model that is trained within seconds."""
    return Scale("demo", {"data": "noise:16"}, ("--task", "spread", "--data", "noise:16", "--test-data", "noise:8"))
''',
}

TINY = [
    *("--encoder.image-size", "32", "32", "--encoder.patch-size", "8", "--encoder.width", "24", "--encoder.depth", "1"),
    *("--encoder.heads", "2", "--predictor.width", "16", "--predictor.depth", "1", "--optim.batch-size", "8"),
    *("--optim.epochs", "1", "--optim.warmup-epochs", "0", "--log.no-tensorboard"),
    *("--speed.device", "cpu", "--speed.workers", "0"),
]


@pytest.fixture(scope="module")
def command(tmp_path_factory, scene_cache):
    """Return a function that runs a command with all plugins in an empty directory, and returns the directory."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in PLUGINS.items():
        (folder / f"{name}.py").write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])]),
        "STOP_MIM_PLUGINS": ",".join(PLUGINS),
        "STOP_MIM_CACHE": str(scene_cache),
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments):
        whole = [sys.executable, "-m", "stop_mim", *arguments]
        ended = subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return folder

    return run


@pytest.fixture(scope="module")
def run(command):
    """Return a run that is trained on the images of a plugin with the covariance of a plugin."""
    options = ["--data", "noise:16", "--positions.covariance", "scalar", "--out", "run"]
    return command("pretrain", "demo", *TINY, *options) / "run"


def test_a_source_and_a_covariance_train(run):
    config = json.loads((run / "config.json").read_text())
    assert (config["data"], config["positions"]["covariance"]) == ("noise:16", "scalar")
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_task_with_an_option_scores(command, run):
    data = ["--data", "noise:16", "--test-data", "noise:8", "--speed.device", "cpu", "--speed.workers", "0"]
    command("evaluate", str(run), "--task", "spread", "--spread.power", "2", *data)
    (evaluation,) = json.loads((run / "results.json").read_text())["evaluations"]
    assert (evaluation["task"], evaluation["protocol"]["power"]) == ("spread", 2.0)
    assert evaluation["scores"][0]["value"] > 0


def test_a_sweep_trains_and_evaluates(command):
    folder = command("sweep", "loudness", "--scale", "seconds", "--seeds", "0", "--variants", "loud", *TINY)
    summary = json.loads((folder / "runs" / "sweep-loudness-seconds" / "summary.json").read_text())
    assert (summary["failed"], summary["unfinished"]) == ({}, [])
    assert {"spread/std", "health/A_norm"} <= set(summary["variants"]["loud"]["scores"])
    run = json.loads((folder / "runs" / "sweep-loudness-seconds" / "loud" / "seed-0" / "config.json").read_text())
    assert (run["positions"]["sigma"], run["encoder"]["width"]) == (1.0, 24)
