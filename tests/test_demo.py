"""The demo from scenes to its table, on a run too short to learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from stop_mim import demo
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.build import build_objective
from stop_mim.results import headline_table, read_results
from stop_mim.seeds import derive_seed
from stop_mim.training.recipes import find_recipe


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TEST_SCENES", "scenes:count=120,size=32")
    monkeypatch.setattr(demo, "LABELLED_SCENES", 60)
    config = find_recipe("demo")
    return replace(config, data="scenes:count=64,size=32", optim=replace(config.optim, epochs=2, warmup_epochs=1))


def test_the_demo_prints_a_table_and_draws_figures(small_demo, tmp_path):
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=100, file=nowhere)
        run = demo.run_demo(small_demo, console)
    shown = console.export_text()
    for words in ("StoP, trained", "the same, untrained", "pixels", "chance", "12.5", "16.7", "stop-mim pretrain"):
        assert words in shown
    results = read_results(run / "results.json")
    assert [one.is_baseline for one in results] == [False] * 4 + [True] * 4
    table = headline_table(results)
    names = [f"{task}/{probe}/top1" for task in ("count", "distance") for probe in ("linear", "knn/neighbours=20")]
    assert [row[0] for row in table.rows] == names
    assert all(0 <= float(cell) <= 100 for row in table.rows for cell in (row[1], *row[3:])), "nothing is missing"
    assert "count/linear/top1" in (run / "report.html").read_text()
    for name in ("loss.png", "positions.png"):
        pixels = np.asarray(Image.open(run / name).convert("RGB"))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50, "the figure is not empty"
    assert run.resolve() == (tmp_path / "stop-mim-demo").resolve()
    assert demo.unused(run).name == "stop-mim-demo-2"
    torch.manual_seed(derive_seed(small_demo.seed, "weights"))
    first = build_objective(small_demo).encoder.state_dict()
    for name, weights in load_encoder(f"untrained:{run}").state_dict().items():
        assert torch.equal(weights, first[name]), "the untrained encoder has the initial weights of the run"
