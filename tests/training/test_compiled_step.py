"""A compiled run: one graph for all of it, the same loss and gradients as without, and an exact resume.

The runs are in a process of their own, without the checks of shapes, which no compiler can follow:
python test_compiled_step.py FOLDER DEVICE BACKEND writes what was found to FOLDER/found.json.
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config
from torch._dynamo.utils import counters

import stop_mim
from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, LogConfig, PositionsConfig, SpeedConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.recipes import find_recipe
from stop_mim.training.run_folder import read_metrics

STEPS = 6
RECIPES = ("stop-tiny-imagenet", "ijepa-tiny-imagenet", "stop-mae-tiny-imagenet", "stop-data2vec-tiny-imagenet")


def graph_breaks():
    """Why the compiler breaks the graph of each objective, where it does."""
    found = {}
    for name in RECIPES:
        config = find_recipe(name)
        config = replace(
            config,
            encoder=replace(config.encoder, width=32, depth=1, heads=2),
            predictor=replace(config.predictor, width=32, depth=1, heads=2),
            objective=replace(config.objective, target_layers=1),
        )
        objective = build_objective(config)
        masks = build_masks(config.masks, objective.encoder.grid).sample(2)
        torch._dynamo.reset()
        told = torch._dynamo.explain(objective)(torch.randn(2, 3, 64, 64), masks, objective.draw_noise(masks))
        if told.graph_count != 1 or told.graph_break_count:
            found[name] = [str(reason.reason) for reason in told.break_reasons]
    return found


def main(folder, device, backend):
    torch.set_num_threads(1)
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=backend)
    console = Console(file=io.StringIO(), width=300)
    config = tiny_config(
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=32, depth=1, heads=2),
        positions=PositionsConfig(sigma=2.0),
        log=LogConfig(1, 1000, False),
        speed=SpeedConfig(device, batch_size_per_device=4, workers=0, compile=True),
    )

    def run(name, steps, **changes):
        train(replace(config, out=str(folder / name), stop_after_steps=steps, **changes), console=console)

    run("compiled", STEPS)
    run("parts", STEPS // 2)
    resume(folder / "parts", stop_after_steps=STEPS, console=console)
    found = {name: dict(counters[name]) for name in ("stats", "graph_break")}
    found["breaks"] = graph_breaks() if device == "cpu" else {}
    run("eager", STEPS, speed=replace(config.speed, compile=False))
    (folder / "found.json").write_text(json.dumps(found | {"shown": console.file.getvalue()}))


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
        [sys.executable, __file__, str(folder), *request.param],
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
