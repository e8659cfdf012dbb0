"""The demo from scenes to its table, on a run too short to learn."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from stop_mim import demo
from stop_mim.training.recipes import find_recipe


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TEST_SCENES", "scenes:count=300,size=32")
    monkeypatch.setattr(demo, "LABELLED_SCENES", 100)
    config = find_recipe("demo")
    return replace(config, data="scenes:count=128,size=32", optim=replace(config.optim, epochs=2, warmup_epochs=1))


def test_the_demo_prints_a_table_and_draws_figures(small_demo, tmp_path):
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=100, file=nowhere)
        run = demo.run_demo(small_demo, console)
    shown = console.export_text()
    for words in ("StoP, trained", "the same, untrained", "pixels", "chance", "12.5", "16.7", "stop-mim pretrain"):
        assert words in shown
    scores = json.loads((run / "demo.json").read_text())
    assert set(scores) == {"trained", "untrained", "pixels"}
    for values in scores.values():
        names = ("linear/top1", "knn/neighbours=20/top1")
        assert {f"{task}/{name}" for task in ("count", "distance") for name in names} <= set(values)
        assert all(0 <= value <= 100 for value in values.values())
    for name in ("loss.png", "positions.png"):
        pixels = np.asarray(Image.open(run / name).convert("RGB"))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50, "the figure is not empty"
    assert run.resolve() == (tmp_path / "stop-mim-demo").resolve()
    assert demo.unused(run).name == "stop-mim-demo-2"


def test_the_untrained_encoder_has_the_initial_weights_of_the_run(small_demo):
    from stop_mim.models.build import build_encoder, build_objective
    from stop_mim.seeds import derive_seed

    torch.manual_seed(derive_seed(small_demo.seed, "weights"))
    untrained = build_encoder(small_demo.encoder)
    torch.manual_seed(derive_seed(small_demo.seed, "weights"))
    first = build_objective(small_demo).encoder
    for ours, theirs in zip(untrained.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)
