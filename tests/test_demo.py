"""The demo's way from scenes to a table, on a run too short to learn; and its figures, which must not be empty."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from stop_mim import demo
from stop_mim.errors import InputError
from stop_mim.training.recipes import find_recipe


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "TEST_SCENES", "scenes:count=300,size=32")
    monkeypatch.setattr(demo, "LABELLED_SCENES", 100)
    config = find_recipe("demo")
    return replace(config, data="scenes:count=128,size=32", optim=replace(config.optim, epochs=2, warmup_epochs=1))


def test_the_demo_ends_with_a_table_figures_and_what_to_type_next(small_demo, tmp_path):
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115 - as long as the console
    folder = demo.run_demo(small_demo, console)
    console.file.close()
    shown = console.export_text()
    for words in ("StoP, trained", "the same, untrained", "pixels", "chance", "stop-mim pretrain stop-tiny-imagenet"):
        assert words in shown
    scores = json.loads((folder / "demo.json").read_text())
    assert set(scores) == {"trained", "untrained", "pixels"}
    for values in scores.values():
        assert {
            "count/linear/top1",
            "count/knn/neighbours=20/top1",
            "distance/linear/top1",
            "distance/knn/neighbours=20/top1",
        } <= set(values)
        assert all(0 <= values[name] <= 100 for name in values)
    for name in ("loss.png", "positions.png"):
        pixels = np.asarray(Image.open(folder / name).convert("RGB"))
        assert pixels.shape[0] > 300
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    assert folder.resolve() == (tmp_path / "stop-mim-demo").resolve()
    assert demo.free_folder(folder).name == "stop-mim-demo-2"


def test_the_untrained_encoder_is_the_one_that_was_trained(small_demo):
    from stop_mim.seeds import derive_seed
    from stop_mim.training.build import build_encoder, build_objective

    torch.manual_seed(derive_seed(small_demo.seed, "weights"))
    untrained = build_encoder(small_demo.encoder)
    torch.manual_seed(derive_seed(small_demo.seed, "weights"))
    first = build_objective(small_demo).encoder
    for ours, theirs in zip(untrained.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_other_data_are_refused(small_demo, tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "one.png")
    for number in range(20):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / f"{number}.png")
    with pytest.raises(InputError, match="it needs scenes"):
        demo.run_demo(replace(small_demo, data=str(tmp_path), out=str(tmp_path / "x")), Console(quiet=True))
