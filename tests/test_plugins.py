"""From outside the package, through the command line: a source, covariance, task, sweep, figure and export format."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from stop_mim.cli import main

PLUGINS = {
    "sweep_test_source": """
import numpy as np
import torch

from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import source


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

    def fingerprint(self, times=True):
        return f"{len(self):08x}"


@source("noise", help="noise:COUNT", prefix="noise:")
def open_noise(count, split):
    return Noise(int(count))
""",
    "sweep_test_covariance": '''
import torch
from torch import nn

from stop_mim.positions import COVARIANCES, Covariance


@COVARIANCES.register("scalar")
class Scalar(Covariance):
    """One learned scale for all features."""

    def __init__(self, dim, projection):
        super().__init__()
        self.noise_dim, self.scale = dim, nn.Parameter(torch.tensor(0.5))

    def factor(self):
        return self.scale * torch.eye(self.noise_dim)
''',
    "sweep_test_task": '''
from dataclasses import dataclass
from typing import Annotated

from stop_mim.constraints import ABOVE_ZERO, Checked
from stop_mim.results import Score
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
        features = test.features.last(1).on(self.subject.ranks.device)
        yield Score("std", features.std().item() ** self.options.power, headline=True)
''',
    "sweep_test_sweep": '''
from stop_mim.sweeps.grid import SWEEPS, Sweep
from stop_mim.sweeps.scales import SCALES, Scale


@SWEEPS.register("loudness")
def loudness():
    """Two values of sigma."""
    return Sweep("quiet", {"quiet": {"positions.sigma": 0.0}, "loud": {"positions.sigma": 1.0}})


@SCALES.register("seconds")
def seconds():
    """A model that is trained within seconds."""
    data = ("--data", "noise:16", "--test-data", "noise:8")
    return Scale("demo", {"data": "noise:16"}, ("--task", "spread", "--spread.power", "2", *data))
''',
    "sweep_test_output": '''
from matplotlib.figure import Figure

from stop_mim.analysis import FIGURES
from stop_mim.exchange import EXPORTERS


@FIGURES.register("mine")
def mine(runs, score):
    """My figure."""
    return Figure()


@EXPORTERS.register("mine")
def write_norm(encoder, folder, place):
    """My format."""
    from stop_mim.exchange.formats import Exported

    (folder / "norm.txt").write_text(str(encoder.vit.norm.weight.tolist()))
    return Exported("numpy", [])
''',
}

TINY = [
    *("--encoder.image-size", "32", "32", "--encoder.patch-size", "8", "--encoder.width", "24", "--encoder.depth", "1"),
    *("--encoder.heads", "2", "--predictor.width", "16", "--predictor.depth", "1", "--optim.batch-size", "8"),
    *("--optim.epochs", "1", "--optim.warmup-epochs", "0", "--log.no-tensorboard"),
    *("--speed.device", "cpu", "--speed.workers", "0"),
]


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Work in a directory with the plugins, in one thread."""
    for name, text in PLUGINS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])]))
    monkeypatch.setenv("STOP_MIM_PLUGINS", ",".join(PLUGINS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run_forked(command):
    """Run a command in a forked process, whose plugins do not stay registered here; return its exit code."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(command,))
    process.start()
    process.join()
    return process.exitcode


def test_a_sweep_trains_with_a_source_and_a_covariance_and_evaluates_by_a_task_with_an_option(plugins):
    """The sweep, in a forked process, runs `pretrain` and `evaluate` as new ones, which load the plugins again."""
    command = ["sweep", "loudness", "--scale", "seconds", "--seeds", "0", "--variants", "loud"]
    command += ["--positions.covariance", "scalar", *TINY]
    assert run_forked(command) == 0
    sweep = plugins / "runs" / "sweep-loudness-seconds"
    summary = json.loads((sweep / "summary.json").read_text())
    assert (summary["failed"], summary["unfinished"]) == ({}, [])
    loud = summary["variants"]["loud"]
    assert set(loud["scores"]) == {"spread/std"}
    assert "A_norm" in loud["health"]
    run = sweep / "loud" / "seed-0"
    config = json.loads((run / "config.json").read_text())
    assert (config["data"], config["positions"]["covariance"]) == ("noise:16", "scalar")
    assert (config["positions"]["sigma"], config["encoder"]["width"]) == (1.0, 24)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    (evaluation,) = json.loads((run / "results.json").read_text())["evaluations"]
    assert (evaluation["task"], evaluation["protocol"]["power"]) == ("spread", 2.0)
    assert evaluation["scores"][0]["value"] > 0


def test_a_figure_and_an_export_format_are_listed_and_run(plugins, capfd):
    assert run_forked(["figure", "mine", "--out", "figures"]) == 0
    assert {file.name for file in Path("figures").iterdir()} == {"figure-mine.pdf", "figure-mine.png"}
    assert run_forked(["figure", "--help"]) == run_forked(["export", "--help"]) == 0
    assert run_forked(["figure", "minne"]) == run_forked(["export", "timm:x", "--to", "minne", "--out", "x"]) == 2
    shown = capfd.readouterr()
    assert "mine: My figure." in shown.out
    assert "{timm,hf,onnx,export,mine}" in shown.out
    assert "There is no figure 'minne': did you mean 'mine'?" in shown.err
    assert "--to is 'minne': choose timm, hf, onnx, export or mine." in shown.err
    train = ["pretrain", "demo", "--data", "noise:16", "--stop-after-steps", "1", "--out", "run", *TINY]
    assert run_forked(train) == run_forked(["export", "run", "--to", "mine", "--out", "exported"]) == 0
    assert {file.name for file in Path("exported").iterdir()} == {"README.md", "norm.txt"}
