"""The Python code of the README and of the guides runs as it is written there."""

import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from stop_mim import (
    SinCosPositions,
    StochasticPositions,
    create_encoder,
    evaluate,
    load_encoder,
    save_encoder,
    train,
)
from stop_mim.errors import InputError
from stop_mim.positions import COVARIANCES
from stop_mim.registry import load_plugins

ROOT = Path(__file__).parents[1]


def code(page: str, containing: str) -> str:
    """The one block of Python on a page that contains a text."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if containing in block]
    return found


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    encoder = create_encoder("tiny", image_size=32, patch_size=16).eval()
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    save_encoder(encoder, tmp_path / "runs" / "photos" / "encoder.safetensors")
    return encoder


def test_the_encoder_of_a_run_loads(run_folder):
    names = {"images": torch.randn(2, 3, 32, 32)}
    exec(code("README.md", "load_encoder("), names)
    assert names["tokens"].shape == (2, 4, 192)
    assert names["features"].shape == (2, 4 * 192)


def test_three_lines_put_stop_into_another_model():
    lines = code("README.md", "self.positions =")
    assert code("docs/guides/library.md", "self.positions =") == lines
    imports, definition, use = lines.split("\n\n")
    names = {"nn": nn, "torch": torch}
    model = f"""
{imports}

class Model(nn.Module):
    def __init__(self, grid, dim):
        super().__init__()
        self.decoder_embed, self.mask_token = nn.Linear(32, dim), nn.Parameter(torch.zeros(dim))
        {definition}

    def forward(self, features, visible, hidden):
{textwrap.indent(use, " " * 8)}
        return context, masked
"""
    exec(model, names)
    model, order = names["Model"]((4, 4), 24), torch.rand(2, 16).argsort(1)
    inputs = torch.randn(2, 6, 32), order[:, :6], order[:, 6:]
    (context, masked), (again, others) = model(*inputs), model(*inputs)
    assert torch.equal(context, again)
    assert not torch.isclose(masked, others).all(-1).any()
    masked.square().sum().backward()
    assert model.decoder_embed.weight.grad.any()
    model.eval()
    assert torch.equal(model(*inputs)[1], model(*inputs)[1])


def test_the_functions_of_the_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "labelled-photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draws.integers(0, 255, (40, 50, 3), dtype=np.uint8))
        image.save(folder / f"{number}.png")
    (tmp_path / "photos").symlink_to(tmp_path / "labelled-photos" / "a")
    options = {
        **{
            "encoder.image_size": (32, 32),
            "encoder.patch_size": 8,
            "encoder.width": 24,
            "encoder.depth": 1,
            "encoder.heads": 2,
        },
        **{"predictor.width": 16, "predictor.depth": 1, "optim.batch_size": 8, "optim.epochs": 1},
        **{"optim.warmup_epochs": 0, "speed.device": "cpu"},
    }
    page = code("docs/guides/library.md", "from stop_mim import evaluate")
    page = page.replace('{"optim.epochs": 50}', "options").replace(
        '"labelled-photos"', '"labelled-photos", options=cpu'
    )
    names = {"image": image, "options": options, "cpu": {"speed.device": "cpu"}}
    exec(page, names)
    assert names["result"].finished
    assert names["features"].shape == (1, 24)
    again = load_encoder(str(tmp_path / "photos.safetensors"))
    assert torch.equal(again.embed(again.transform(image)[None]), names["features"])
    with pytest.raises(InputError, match=r"'optim\.epoch'.*'optim\.epochs'"):
        train("demo", options={"optim.epoch": 3})
    with pytest.raises(InputError, match="compat is 'paper': choose one of corrected, release, paper-text"):
        train("demo", compat="paper")
    with pytest.raises(InputError, match="data is not given"):
        evaluate("runs/photos", task="knn")


def test_the_training_loop_trains():
    names = {"batches": torch.randn(2, 4, 3, 64, 64)}
    torch.manual_seed(0)
    loop = code("README.md", "for images in batches")
    assert code("docs/guides/library.md", "for images in batches") == loop
    exec(
        loop.replace("for images in batches", "losses = []\nfor images in batches") + "    losses.append(loss.item())",
        names,
    )
    assert len(names["losses"]) == 2
    model = names["model"]
    weights = zip(model.target.parameters(), model.encoder.parameters(), strict=True)
    moved = [(ours - theirs).abs().max().item() for theirs, ours in weights if ours.requires_grad]
    assert all(0 < distance < 0.1 for distance in moved)


def test_a_covariance_is_one_class_in_a_module_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text(code("docs/guides/research.md", "# my_plugin.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("STOP_MIM_PLUGINS", "my_plugin")
    monkeypatch.delitem(sys.modules, "my_plugin", raising=False)
    load_plugins()
    try:
        positions = StochasticPositions(SinCosPositions(4, 8), nn.Linear(12, 8), covariance="half_identity")
        indices = torch.arange(16).expand(2, 16)
        noise = positions(indices) - positions.table()[indices]
        assert not noise[..., 4:].any()
        assert noise[..., :4].all()
        torch.testing.assert_close(positions.covariance_matrix().diagonal(), torch.tensor([0.25] * 4 + [0.0] * 4))
    finally:
        del COVARIANCES._entries["half_identity"], sys.modules["my_plugin"]
