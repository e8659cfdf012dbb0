"""A sweep of two variants whose runs take seconds, and a stand-in for the commands that takes none."""

import io
import json
import sys

import pytest
from rich.console import Console

from stop_mim.sweeps import launch
from stop_mim.sweeps.grid import SWEEPS, Sweep
from stop_mim.sweeps.scales import SCALES, Scale

# Writes what `pretrain` and `evaluate` would write. A run of the variant noisy does what the file named by its seed says.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path

command, *arguments = sys.argv[1:]
run = Path(arguments[arguments.index("--out") + 1] if command == "pretrain" else arguments[0])
order = Path(f"order-{run.name}") if run.parent.name == "noisy" else Path("none")
order = order.read_text() if order.exists() else ""
with open("commands.txt", "a") as file:
    file.write(f"{command} {run.parent.name}/{run.name} {os.environ.get('OMP_NUM_THREADS')}\\n")
if command == "evaluate" and "broken" in arguments:
    sys.exit("stop-mim: 'broken' has no labels.")
elif command == "evaluate":
    Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"scores": len(run.parent.name) + int(run.name[-1])}))
else:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 40, "images_per_second": 16.0, "health/A_norm": 2.0}\\n')
    if order == "diverge":
        status = {"state": "failed", "step": 40, "total_steps": 40, "message": "The loss is not finite.", "updated": ""}
        (run / "status.json").write_text(json.dumps(status))
        sys.exit("Traceback: ...\\nTrainingDiverged")
    if order == "refuse":
        sys.exit("stop-mim: data is not given: add --data.")
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "wait":
        signal.signal(signal.SIGTERM, lambda *_: ((run / "saved").touch(), sys.exit(143)))
        (run / "waits").touch()
        time.sleep(60)
"""


@pytest.fixture
def mini(monkeypatch, tmp_path):
    """Register the sweep and the scale "mini", and work in an empty directory."""
    variants = {
        "fixed": {"positions.kind": "sincos"},
        "noisy": {"positions.kind": "stochastic", "positions.sigma": 1.0},
    }
    overrides = {
        "data": "scenes:count=32,size=32",
        "optim.epochs": 10,
        "optim.batch_size": 8,
        "optim.warmup_epochs": 1.0,
    }
    entries = {"sweep": Sweep("fixed", variants), "scale": Scale("demo", overrides, ("--data", "scenes"))}
    monkeypatch.setitem(SWEEPS._entries, "mini", lambda: entries["sweep"])
    monkeypatch.setitem(SCALES._entries, "mini", lambda: entries["scale"])
    monkeypatch.chdir(tmp_path)
    return entries


@pytest.fixture
def stand_in(mini, monkeypatch, tmp_path):
    """Let the stand-in run instead of `python -m stop_mim`; return a function that reads what was run."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, "stand_in.py"))
    monkeypatch.setattr("stop_mim.sweeps.summary.read_scores", _read_scores)
    commands = tmp_path / "commands.txt"
    return lambda: sorted(commands.read_text().splitlines()) if commands.exists() else []


def _read_scores(run, probe):
    file = run / probe.file
    return {f"{probe.prefix}linear/top1": float(json.loads(file.read_text())["scores"])} if file.exists() else {}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=160)
