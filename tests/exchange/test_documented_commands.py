"""Every command of docs/exchange.md, as it stands there."""

import io
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from release_files import release
from rich.console import Console

from stop_mim.cli import main
from stop_mim.training.loop import train

PAGE = Path(__file__).parents[2] / "docs" / "exchange.md"


def commands():
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_of_the_page(tmp_path, monkeypatch, run_config, capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    train(replace(run_config, out="runs/x"), console=Console(file=io.StringIO()))
    torch.save(release(), "jepa.pth.tar")
    found = commands()
    assert [command[:2] for command in found if command[0] == "stop-mim"].count(["stop-mim", "export"]) == 3
    for command in found:
        if command[0] == "stop-mim":
            main(command[1:])
        else:
            subprocess.run([sys.executable, *command[1:]], check=True)
    assert (tmp_path / "runs" / "more" / "encoder.safetensors").exists()
    # The last command's table: the same score three times in each row.
    rows = [line for line in capsys.readouterr().out.splitlines() if "knn/neighbours=10/top1" in line]
    scores = re.findall(r"\d+\.\d \[", rows[-1])
    assert len(scores) == 3
    assert len(set(scores)) == 1
