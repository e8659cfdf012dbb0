"""A compiled run: one graph for all of it, the same loss and gradients as without, and an exact resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import assert_same_checkpoint, checkpoint_at

import stop_mim
from stop_mim.training.run_folder import read_metrics

TOTAL = 21
# Without inductor, whose C++ takes a minute to compile, the graphs are traced and differentiated all the same.
WAYS = [
    ("cpu", "aot_eager"),
    pytest.param(("cpu", "inductor"), marks=pytest.mark.slow),
    pytest.param(("cuda", "inductor"), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def compiled(request, tmp_path_factory):
    """The device, the folder with the runs, and what was found in a process without the checks of these tests."""
    folder = tmp_path_factory.mktemp("compiled")
    paths = [str(Path(stop_mim.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "STOP_MIM_CACHE": str(folder / "scenes"),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiled_run.py")), str(folder), *request.param],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param[0], folder, torch.load(folder / "found.pt", weights_only=True)


def test_nothing_failed_and_nothing_was_left_out(compiled):
    device, _, found = compiled
    assert found["compiled"]["told"] == ["compiling… the first step takes about a minute"]
    assert found["eager"]["told"] == []
    assert "could not be" not in found["shown"]
    assert found["counters"]["graph_break"] == {}
    # Of all models and runs, whatever their sigma, on the CPU; on a GPU the step that is captured may be another.
    assert found["counters"]["stats"]["unique_graphs"] <= (1 if device == "cpu" else 2)


def test_every_objective_with_every_kind_of_noise_is_one_graph(compiled):
    """A break would split what the compiler can fuse."""
    assert compiled[2]["breaks"] == {}


def test_loss_and_gradients_are_those_of_the_plain_model(compiled):
    device, _, found = compiled
    ours, theirs = found["compiled"], found["eager"]
    half = device == "cuda"
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3 if half else 1e-6)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=2e-2 if half else 1e-5)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    assert len(ours["gradients"]) > 20
    for name, gradient in theirs["gradients"].items():
        apart = (ours["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-4)
        assert apart < (0.05 if half else 1e-4), name


def test_the_seed_decides_the_noise(compiled):
    _, _, found = compiled
    for one, same, other in (found["compiled"]["noisy"], found["eager"]["noisy"]):
        assert one == same
        assert one != pytest.approx(other, rel=1e-4)


def test_a_compiled_run_is_resumed_exactly(compiled):
    device, folder, _ = compiled
    whole, parts = read_metrics(folder / "whole"), read_metrics(folder / "parts")
    assert [line["step"] for line in parts] == list(range(1, TOTAL + 1))
    losses = [[line["loss"] for line in lines] for lines in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if device == "cuda" else 0)
    if device == "cpu":
        assert_same_checkpoint(checkpoint_at(folder / "whole", TOTAL), checkpoint_at(folder / "parts", TOTAL))
    assert sum(losses[0][-5:]) < sum(losses[0][:5])
