"""Every command of docs/exchange.md, as it stands there."""

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stop_mim.cli import main
from stop_mim.results import read_results
from stop_mim.training.pretrain import train

PAGE = Path(__file__).parents[2] / "docs" / "exchange.md"


def commands():
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.usefixtures("transformers", "released")
def test_the_commands_of_the_page(tmp_path, monkeypatch, two_steps, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    train(replace(two_steps, out="runs/x"), console=Console(file=io.StringIO()))
    found = commands()
    assert [command[:2] for command in found if command[0] == "stop-mim"].count(["stop-mim", "export"]) == 3
    for command in found:
        if command[0] == "stop-mim":
            main(command[1:])
        else:
            exec(command[2], {})
    assert "(4, 4)" in capsys.readouterr().out
    assert (tmp_path / "runs" / "more" / "encoder.safetensors").exists()
    # The last command's scores are the same for all three encoders.
    results = [*read_results(tmp_path / "results.json"), *read_results(tmp_path / "runs" / "x" / "results.json")]
    scores = {one.encoder: one.scores for one in results if one.task == "knn" and one.label == "count"}
    assert scores["out/timm"] == scores["out/hf"] == scores["runs/x"]
