"""What a benchmark measures and reports, at sizes that take no time; never how fast it is."""

import io
import multiprocessing
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from stop_mim.benchmark import bench as bench_module
from stop_mim.benchmark.bench import open_run, run_bench, steps_of
from stop_mim.benchmark.flops import TokenCounts, step_flops
from stop_mim.errors import InputError
from stop_mim.training import pretrain, trial
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import EncoderConfig, MaskConfig, SpeedConfig
from stop_mim.training.run_folder import RunFolder

COMMON = {"masks", "whole forward", "backward", "optimiser"}
PARTS = {
    "ijepa": COMMON | {"target forward", "context encoder forward", "predictor forward", "EMA of the target"},
    "mae": COMMON | {"context encoder forward", "decoder forward"},
    "data2vec": COMMON | {"target forward", "student forward", "EMA of the target"},
}


def opened(config, uses_data=False):
    return open_run(config, uses_data, ProgressDisplay(shown=False), print)


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_of_an_objective_is_measured_and_shown(tiny, short, capsys, kind):
    report = run_bench(tiny(kind), short, "tiny")
    shown = capsys.readouterr().out
    assert set(report.parts) == PARTS[kind]
    assert all(
        name in shown for name in (*report.parts, "images/s", "host gaps", "does not apply", "peak memory", "ceiling")
    )
    assert all(spread.median > 0 for name, spread in report.parts.items() if name != "backward")
    assert report.step.images_per_second.median == pytest.approx(8 / report.step.seconds.median)
    assert report.step.peak_memory > 2**20
    assert report.ceiling > 0
    assert report.flops > 0
    assert report.host_gap is None
    assert (report.images_per_step, report.batches_per_step, report.dtype) == (8, 2, "float32")
    assert report.tokens["grid"] == 16


def test_the_loader_is_measured_where_data_are_given_and_its_workers_end(tiny, short):
    speed = replace(tiny().speed, loader="streaming", workers=1)
    report = run_bench(tiny(speed=speed), replace(short, images="data"), "tiny")
    assert "data (loader)" in report.parts
    assert "scenes:count=24,size=32" in report.images
    assert multiprocessing.active_children() == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PARTS)
def test_a_captured_step_and_its_parts_on_a_gpu(tiny, short, kind):
    speed = replace(tiny().speed, device="cuda", compile=False, graph=True)
    report = run_bench(tiny(kind, speed=speed), replace(short, warmup=5), "tiny")
    assert set(report.parts) == PARTS[kind]
    assert report.busy_seconds > 0
    assert report.host_gap is not None
    assert report.execution == "eager, captured as a CUDA graph"
    assert report.dtype == "bfloat16"
    assert not [note for note in report.notes if "could not be captured" in note]


def test_the_measured_step_is_the_one_that_trains(tiny, tmp_path):
    config = tiny(stop_after_steps=3, out=str(tmp_path / "run"))
    pretrain.train(config, console=Console(file=io.StringIO()))
    run = opened(config, uses_data=True)
    with steps_of(run) as step:
        for _ in range(3):
            step()
    expected = read_checkpoint(RunFolder(tmp_path / "run").newest_checkpoint()).tensors
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in run.objective.state_dict().items())


def test_what_training_decides_is_measured(tiny, short, monkeypatch):
    free = tiny(speed=SpeedConfig(device="cpu", workers=0))
    monkeypatch.setattr(trial, "PATCHES_AT_ONCE_ON_CPU", 2 * 16)
    assert opened(free).inputs.per_device == 2
    derived = replace(free, optim=replace(free.optim, derive=("batch_size",)))
    assert opened(derived, uses_data=True).config.optim.batch_size == 12
    report = run_bench(derived, short)
    assert (report.images_per_step, report.config["speed"]["batch_size_per_device"]) == (8, 2)


@pytest.mark.gpu
def test_on_a_gpu_it_is_measured_how_many_images_fit_at_once(tiny):
    config = tiny(speed=SpeedConfig("cuda", workers=0))
    inputs = opened(replace(config, optim=replace(config.optim, batch_size=32))).inputs
    assert (inputs.per_device, inputs.batches_per_step) == (32, 1)


@pytest.mark.parametrize("compat", [None, "release"])
def test_masks_that_change_their_size_are_measured_as_they_are_trained(tiny, monkeypatch, compat):
    def accelerated(step, speed, steps, say, warn, fixed_shapes):
        found.append(fixed_shapes)
        return step

    found = []
    monkeypatch.setattr(pretrain, "accelerate", accelerated)
    encoder = EncoderConfig("tiny", image_size=(32, 32), patch_size=4, width=24, depth=2, heads=2)
    opened(tiny(encoder=encoder, masks=MaskConfig(compat=compat)))
    assert found == [compat is None]


def test_operations_are_those_of_a_transformer(tiny):
    config, counts = tiny("mae"), TokenCounts(grid=16, context=4, blocks=1, target=12)

    def layer(tokens, width):
        return 2 * tokens * 12 * width**2 + 4 * tokens**2 * width

    # The decoder's last layer leaves the MLP of the context tokens out. Pixels and noise get no gradient.
    predictor = layer(16, 16) - 2 * 4 * 8 * 16**2 + 2 * 4 * 24 * 16 + 2 * 12 * 16 * 192
    learned = 3 * (2 * layer(4, 24) + predictor) + 2 * (2 * 4 * 192 * 24 + 2 * 12 * 24 * 16)
    assert step_flops(config, counts, 5) == 5 * learned


def test_a_batch_that_does_not_fit_is_named_with_the_remedy(tiny, short, monkeypatch):
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_module, "open_run", full)
    with pytest.raises(InputError, match=r"do not fit .*--speed\.batch-size-per-device"):
        run_bench(tiny(), short)
