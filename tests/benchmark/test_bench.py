"""All that a benchmark measures and tells, at sizes that take no time: that it is there, never how fast it is."""

import io
import json
import multiprocessing
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from stop_mim.benchmark.bench import run_bench
from stop_mim.benchmark.findings import read_report, write_report
from stop_mim.benchmark.parts import part_names
from stop_mim.benchmark.scaling import VARIANTS, measure_scaling, variants
from stop_mim.benchmark.workload import Workload
from stop_mim.errors import InputError
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import RunFolder

COMMON = {"masks", "whole forward", "backward", "optimiser"}
PARTS = {
    "ijepa": COMMON | {"target forward", "context encoder forward", "predictor forward", "EMA of the target"},
    "mae": COMMON | {"context encoder forward", "decoder forward"},
    "data2vec": COMMON | {"target forward", "student forward", "EMA of the target"},
}


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_of_an_objective_is_measured_and_told(tiny, short, capsys, kind):
    report = run_bench(tiny(kind), short, "tiny")
    shown = capsys.readouterr().out
    assert set(report.parts) == PARTS[kind]
    assert tuple(report.parts) == part_names(tiny(kind), uses_data=False)
    assert all(
        name in shown for name in (*report.parts, "images/s", "host gaps", "does not apply", "peak memory", "ceiling")
    )
    assert all(spread.median > 0 for name, spread in report.parts.items() if name != "backward")
    assert report.step.seconds.median > 0
    assert report.step.images_per_second.median == pytest.approx(8 / report.step.seconds.median)
    assert report.step.peak_memory > 2**20
    assert report.ceiling > 0
    assert report.flops > 0
    assert report.host_gap is None
    assert (report.images_per_step, report.batches_per_step, report.dtype) == (8, 2, "float32")
    assert report.tokens["grid"] == 16


def test_the_loader_is_measured_where_data_are_given(tiny, short):
    report = run_bench(tiny(), replace(short, images="data"), "tiny")
    assert "data (loader)" in report.parts
    assert "resident: 24 images" in report.images


def test_the_loaders_processes_end_with_the_measurement(tiny, short):
    speed = replace(tiny().speed, loader="streaming", workers=1)
    report = run_bench(tiny(speed=speed), replace(short, images="data"), "tiny")
    assert "decoded by 1 workers" in report.images
    assert multiprocessing.active_children() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


def test_a_step_is_the_trainers(tiny):
    workload = Workload(tiny(), uses_data=False)
    learned = [parameter for parameter in workload.objective.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in learned]
    target = workload.objective.target.vit.blocks[0].mlp.fc1.weight.detach().clone()
    workload.step()
    assert all(not torch.equal(one, another) for one, another in zip(before, learned, strict=True))
    assert not torch.equal(target, workload.objective.target.vit.blocks[0].mlp.fc1.weight)


def test_steps_on_data_leave_the_weights_that_the_trainer_leaves(tiny, tmp_path):
    config = tiny(stop_after_steps=3, out=str(tmp_path / "run"))
    train(config, console=Console(file=io.StringIO()))
    workload = Workload(config, uses_data=True)
    for _ in range(3):
        workload.step()
    found, expected = (
        workload.objective.state_dict(),
        read_checkpoint(RunFolder(tmp_path / "run").newest_checkpoint()).tensors,
    )
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in found.items())


def test_what_is_written_can_be_read(tiny, short, tmp_path):
    file = tmp_path / "bench.json"
    report = run_bench(tiny(), replace(short, scaling=True, json=file), "tiny")
    found = read_report(file)
    assert found.step == report.step
    assert found.parts == report.parts
    assert found.scaling == report.scaling
    assert found.notes == report.notes
    write_report(tmp_path / "again.json", found)
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(file.read_text())
    plain = json.loads(file.read_text())
    assert plain["hardware"]
    assert plain["environment"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert plain["environment"]["started"]
    assert plain["config"]["encoder"] == json.loads(json.dumps(asdict(tiny().encoder)))
    assert plain["derived"]["part_of_ceiling"] == pytest.approx(report.flops_per_second / report.ceiling)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match=r"other\.json"):
        read_report(tmp_path / "other.json")


def test_other_sizes_change_one_thing_each(tiny):
    config = tiny()
    workload = Workload(config, uses_data=False)
    made = list(variants(config, workload.per_device, workload.counts))
    assert len(made) == VARIANTS
    assert made[0].config == config
    sizes = [one.config.encoder.image_size for one in made if one.change == "image size"]
    assert sizes == [(16, 16), (64, 64)]
    batches = [one.config for one in made if one.change == "batch"]
    assert [one.speed.batch_size_per_device for one in batches] == [2, 8]
    assert [one.optim.batch_size for one in batches] == [4, 16]
    assert [one.config.encoder.depth for one in made if one.change == "depth"] == [1, 4]
    context = [one.config.masks.context_tokens for one in made if one.change == "context"]
    assert context == [round(workload.counts.context * factor) for factor in (0.5, 1.25)]
    random = tiny("mae")
    counts = Workload(random, uses_data=False).counts
    fewer = next(one.config for one in variants(random, 4, counts) if one.change == "context")
    assert Workload(fewer, uses_data=False).counts.context == counts.context // 2


def test_sizes_that_do_not_work_are_left_out_and_named(tiny, short, monkeypatch):
    config = tiny()
    workload = Workload(config, uses_data=False)

    def full(changed, uses_data):
        if changed.encoder.image_size == (64, 64):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        if changed.encoder.image_size == (16, 16):
            raise InputError("The masks do not fit.")
        return Workload(config, uses_data=False)

    monkeypatch.setattr("stop_mim.benchmark.scaling.Workload", full)
    found = measure_scaling(config, short, workload.per_device, workload.counts)
    left_out = {one.value: one.skipped for one in found if one.step is None}
    assert left_out == {"64x64 pixels": "it does not fit into memory.", "16x16 pixels": "The masks do not fit."}
    assert sum(one.step is not None for one in found) == VARIANTS - 2


def test_a_batch_that_does_not_fit_is_told_with_the_remedy(tiny, short, monkeypatch):
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("stop_mim.benchmark.bench.Workload", full)
    with pytest.raises(InputError, match=r"4 images at a time do not fit .*--speed\.batch-size-per-device"):
        run_bench(tiny(), short)
