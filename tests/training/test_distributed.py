"""Several processes: one model, one writer, and the training that one process does; and devices that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import train_and_watch, train_in
from ranks import run_ranks
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config, write_colours, write_images

from stop_mim.errors import InputError
from stop_mim.training.config import PositionsConfig, ProbeConfig, SpeedConfig
from stop_mim.training.distributed import choose_device
from stop_mim.training.run_folder import read_metrics

TOTAL, MID_EPOCH = 24, 17

# Covariances with an A of their own that gets no noise: never, or not in the first step.
SILENT = {
    "nowhere": PositionsConfig(apply_to="none", covariance="untied"),
    "zero": PositionsConfig(sigma=0.0, covariance="diagonal"),
    "at first": PositionsConfig(sigma_start=0.0, covariance="low_rank(2)"),
}
SILENT_STEPS = 3

# Five steps reach into the second epoch; the virtual shards of three images fit no batch.
STEPS, SHARD = 5, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Where two processes trained, and what each of them saw in the run that was not interrupted."""
    folder = tmp_path_factory.mktemp("two")
    data = write_images(folder / "images", count=100)
    # A bad image is listed by each process, which must not make the folder look used to the other.
    (data / "040.png").write_bytes(b"broken")
    speed = SpeedConfig("cpu", batch_size_per_device=2, workers=0)
    probe = ProbeConfig(str(write_colours(folder / "colours")), batch_size=8, every_steps=3, score_every_steps=8)
    wanted = tiny_config(data, speed=speed, probe=probe)
    wanted = replace(wanted, optim=replace(wanted.optim, epochs=2))
    silent = {
        name: tiny_config(data, speed=speed, positions=positions, stop_after_steps=SILENT_STEPS)
        for name, positions in SILENT.items()
    }
    assert run_ranks(2, train_and_watch, folder, wanted, MID_EPOCH, silent) == [0, 0]
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_each_process_knows_its_rank_and_values_are_shared(run):
    _, seen = run
    assert [one["ranks"] for one in seen] == [(0, 2, True), (1, 2, False)]
    for one in seen:
        assert one["any"] == [True, False]
        assert one["mean"] == 0.5
        assert one["broadcast"] == "from 0"


def test_each_process_has_its_own_images_masks_and_noise(run):
    _, seen = run
    parts = [set(one["indices"].tolist()) for one in seen]
    assert [one["n_images"] for one in seen] == [100, 100]
    assert [len(part) for part in parts] == [48, 48]
    assert not parts[0] & parts[1]
    assert len(seen[0]["images"]) == 2 * TOTAL
    for ours, theirs in zip(seen[0]["images"], seen[1]["images"], strict=True):
        assert ours.shape == theirs.shape == (2, 3, 32, 32)
        assert not torch.equal(ours, theirs)
    equal = [torch.equal(*pair) for pair in zip(seen[0]["masks"], seen[1]["masks"], strict=True)]
    assert sum(equal) < 0.05 * len(equal)
    noise = [tuple(values) for one in seen for values in one["noise"]]
    assert len(set(noise)) == len(noise) == 4 * TOTAL


def test_the_model_is_the_same_in_all_processes_and_has_moved(run):
    folder, seen = run
    saved = checkpoint_at(folder / "whole", TOTAL).tensors
    for name, tensor in seen[0]["weights"].items():
        assert torch.equal(tensor, seen[1]["weights"][name]), name
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    weight = "encoder.vit.blocks.0.attn.qkv.weight"
    assert not torch.equal(seen[0]["weights"][weight], seen[0]["weights"][weight.replace("encoder", "target")])


def test_the_loss_is_the_mean_over_processes_and_batches(run):
    folder, seen = run
    losses = [line["loss"] for line in read_metrics(folder / "whole")]
    pairs = torch.tensor([one["losses"] for one in seen]).reshape(2, TOTAL, 2)
    assert losses == pytest.approx(pairs.mean(dim=(0, 2)).tolist(), rel=1e-5)


def test_only_the_first_process_writes_but_for_its_own_list_of_bad_images(run):
    folder, seen = run
    assert {Path(path).name for path in seen[0]["written"]} >= {"metrics.jsonl", "log.txt", "bad_images.txt"}
    assert {Path(path).name for path in seen[1]["written"]} <= {"whole", "bad_images.rank1.txt"}
    assert "040.png" in (folder / "whole" / "bad_images.rank1.txt").read_text()
    assert [line["step"] for line in read_metrics(folder / "whole")] == list(range(1, TOTAL + 1))


def test_a_run_of_two_processes_is_resumed_bit_for_bit(run):
    folder, _ = run
    assert_same_checkpoint(checkpoint_at(folder / "whole", TOTAL), checkpoint_at(folder / "parts", TOTAL))
    assert [line["step"] for line in read_metrics(folder / "parts")] == list(range(1, TOTAL + 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run of five steps by one process and by four, and by two, then four, then one."""
    folder = tmp_path_factory.mktemp("any")

    def go(name, processes, per_device, stop, resumes=False):
        speed = SpeedConfig("cpu", batch_size_per_device=per_device, workers=0)
        noisy = PositionsConfig(sigma=1.0)
        config = tiny_config("scenes:count=24,size=32", speed=speed, positions=noisy, stop_after_steps=stop)
        assert run_ranks(processes, train_in, folder / name, config, resumes, SHARD) == [0] * processes

    go("one", 1, None, STEPS)
    go("four", 4, 1, STEPS)
    go("changing", 2, None, 1)
    go("changing", 4, 2, 4, resumes=True)
    go("changing", 1, 4, STEPS, resumes=True)
    return folder


@pytest.mark.parametrize("name", ["four", "changing"])
def test_any_number_of_processes_trains_the_same(runs, name):
    losses, others = ([line["loss"] for line in read_metrics(runs / run)] for run in ("one", name))
    assert len(losses) == STEPS
    # Within rounding: sums over images are added up batch by batch.
    assert others == pytest.approx(losses, rel=1e-6)
    ours, theirs = (checkpoint_at(runs / run, STEPS).tensors for run in ("one", name))
    for tensor in (tensor for tensor in ours if tensor.startswith("model.")):
        torch.testing.assert_close(theirs[tensor], ours[tensor], rtol=1e-4, atol=1e-6, msg=tensor)


def test_the_first_process_probes_and_the_other_does_not(run):
    folder, seen = run
    assert [one["probes"] for one in seen] == [True, False]
    scored = {
        line["step"]: line["probe/linear_top1"] for line in read_metrics(folder / "whole") if "probe/loss" in line
    }
    assert list(scored) == [8, 16, 24]
    assert scored == {
        line["step"]: line["probe/linear_top1"] for line in read_metrics(folder / "parts") if "probe/loss" in line
    }


@pytest.mark.parametrize("case", SILENT)
def test_an_A_that_gets_no_noise_keeps_no_process_waiting(run, case):
    folder, _ = run
    weights = [torch.load(folder / f"{case}.rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    saved = checkpoint_at(folder / "silent runs" / case, SILENT_STEPS)
    assert all(torch.equal(tensor, saved.tensors[f"model.{name}"]) for name, tensor in weights[0].items())
    (own,) = [name for name in weights[0] if name.startswith("predictor.positions.covariance.")]
    learned = f"optimiser.exp_avg.{own}" in saved.tensors
    assert learned == (case != "nowhere")
    if learned:
        assert (saved.tensors[f"optimiser.exp_avg.{own}"].abs().sum() > 0) == (case != "zero")


@pytest.mark.parametrize("name", ["gpu", "", "meta", "cuda:200", "cuda:256"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(InputError, match=f"speed.device is '{name}'"):
        choose_device(name)


def test_auto_is_the_gpu_of_the_process_or_the_cpu():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="GPUs"):
        choose_device("cuda", local_rank=torch.cuda.device_count())
