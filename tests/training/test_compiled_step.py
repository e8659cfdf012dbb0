"""A compiled run: one graph for all of it, the same loss and gradients as without, and an exact resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_run import STEPS
from tiny_run import assert_same_checkpoint, checkpoint_at

import stop_mim
from stop_mim.training.run_folder import read_metrics

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
    return request.param[0], folder, json.loads((folder / "found.json").read_text())


def test_the_compiler_neither_fails_nor_breaks_a_graph(compiled):
    """A break would split what the compiler can fuse."""
    device, _, found = compiled
    # Two runs and a resumed one.
    assert found["shown"].count("compiling… the first step takes about a minute") == 3
    assert "could not be" not in found["shown"]
    assert found["graph_break"] == {}
    # Of all runs, whatever their sigma, on the CPU; on a GPU the step that is captured may be another.
    assert found["stats"]["unique_graphs"] <= (1 if device == "cpu" else 2)
    assert found["breaks"] == {}


def test_a_compiled_run_is_the_plain_run(compiled):
    device, folder, _ = compiled
    ours, theirs = (read_metrics(folder / name) for name in ("compiled", "eager"))
    for name, on_cpu, on_gpu in (("loss", 1e-6, 2e-2), ("gradient_norm", 1e-5, 1e-1)):
        expected = pytest.approx([line[name] for line in theirs], rel=on_gpu if device == "cuda" else on_cpu)
        assert [line[name] for line in ours] == expected
    if device == "cpu":
        ours, theirs = (checkpoint_at(folder / name, STEPS).tensors for name in ("compiled", "eager"))
        gradients = {name for name in theirs if name.startswith("optimiser.exp_avg.")}
        assert len(gradients) > 20
        for name in gradients:
            apart = (ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-4)
            assert apart < 1e-3, name


def test_a_compiled_run_is_resumed_exactly(compiled):
    device, folder, _ = compiled
    whole, parts = ([line["loss"] for line in read_metrics(folder / name)] for name in ("compiled", "parts"))
    assert parts == pytest.approx(whole, rel=1e-3 if device == "cuda" else 0)
    if device == "cpu":
        assert_same_checkpoint(checkpoint_at(folder / "compiled", STEPS), checkpoint_at(folder / "parts", STEPS))
