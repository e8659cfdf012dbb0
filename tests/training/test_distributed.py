"""Several processes: the training of one, what each of them writes, and devices that are refused."""

import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_run import checkpoint_at, tiny_config, train_in, write_colours, write_images

from stop_mim.errors import InputError
from stop_mim.training import distributed, pretrain
from stop_mim.training.config import PositionsConfig, ProbeConfig, SpeedConfig
from stop_mim.training.distributed import choose_device
from stop_mim.training.run_folder import read_metrics

# Twelve steps an epoch.
END = 14

# Covariances with an A of their own that gets no noise.
SILENT = {
    "nowhere": PositionsConfig(apply_to="none", covariance="untied"),
    "zero": PositionsConfig(sigma=0.0, covariance="diagonal"),
}
SILENT_STEPS = 3

# Five steps reach into the second epoch; the virtual shards of three images fit no batch.
STEPS, SHARD = 5, 3


def train_and_look(folder, configs):
    """Train the runs by their names; note what this process writes to the first, and the last weights of each."""
    rank, seen = int(os.environ["RANK"]), {"written": []}

    def look(event, arguments):
        written = event in ("os.mkdir", "os.rename", "os.remove")
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            written = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if written and str(arguments[0]).startswith(str(folder / "whole")):
            seen["written"].append(Path(arguments[0]).name)

    def remember(parts, *more):
        seen["weights"] = parts.objective.state_dict()
        return real_run(parts, *more)

    sys.addaudithook(look)
    real_run, pretrain.run = pretrain.run, remember
    with distributed.process_group(SpeedConfig("cpu")) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (rank, 2, rank == 0)
        assert [distributed.any_rank(rank == 1, ranks), distributed.any_rank(False, ranks)] == [True, False]
        assert distributed.reduce_mean(torch.tensor(float(rank)), ranks).item() == 0.5
        assert distributed.broadcast(f"from {rank}", ranks) == "from 0"
        for name, config in configs.items():
            train_in(folder / name, config)
            torch.save(seen, folder / f"{name}.rank{rank}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Where two processes trained; weights and written files of each are in NAME.rankN.pt."""
    folder = tmp_path_factory.mktemp("two")
    data = write_images(folder / "images", count=100)
    # A bad image is listed by each process, which must not make the folder look used to the other.
    (data / "040.png").write_bytes(b"broken")
    speed = SpeedConfig("cpu", batch_size_per_device=2, workers=0)
    probe = ProbeConfig(str(write_colours(folder / "colours")), batch_size=8, every_steps=3, score_every_steps=6)
    wanted = tiny_config(data, speed=speed, probe=probe, stop_after_steps=END)
    silent = {
        name: tiny_config(data, speed=speed, positions=positions, stop_after_steps=SILENT_STEPS)
        for name, positions in SILENT.items()
    }
    assert run_ranks(2, train_and_look, folder, {"whole": wanted, **silent}) == [0, 0]
    return folder


def seen_in(folder, name):
    """What both processes saw, after asserting that they and the checkpoint have the same weights."""
    seen = [torch.load(folder / f"{name}.rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    saved = checkpoint_at(folder / name, END if name == "whole" else SILENT_STEPS).tensors
    for weight, tensor in seen[0]["weights"].items():
        assert torch.equal(tensor, seen[1]["weights"][weight]), weight
        assert torch.equal(tensor, saved[f"model.{weight}"]), weight
    return seen, saved


def test_only_the_first_process_writes_but_for_its_own_list_of_bad_images(two):
    (first, second), _ = seen_in(two, "whole")
    assert {*first["written"]} >= {"metrics.jsonl", "log.txt", "bad_images.txt"}
    assert {*second["written"]} <= {"whole", "bad_images.rank1.txt"}
    assert "040.png" in (two / "whole" / "bad_images.rank1.txt").read_text()
    lines = read_metrics(two / "whole")
    assert [line["step"] for line in lines] == list(range(1, END + 1))
    assert [line["step"] for line in lines if "probe/loss" in line] == [6, 12]


@pytest.mark.parametrize("case", SILENT)
def test_an_A_that_gets_no_noise_keeps_no_process_waiting(two, case):
    (first, _), saved = seen_in(two, case)
    (own,) = [name for name in first["weights"] if name.startswith("predictor.positions.covariance.")]
    learned = f"optimiser.exp_avg.{own}" in saved
    assert learned == (case != "nowhere")
    if learned:
        assert (saved[f"optimiser.exp_avg.{own}"].abs().sum() > 0) == (case != "zero")


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
    # Four images at once, as the run has recorded them, do not fit four processes.
    go("changing", 4, 4, 4, resumes=True)
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


@pytest.mark.parametrize("name", ["gpu", "", "meta", "cuda:200", "cuda:256"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(InputError, match=f"speed.device is '{name}'"):
        choose_device(name)


def test_auto_is_the_gpu_of_the_process_or_the_cpu():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="GPUs"):
        choose_device("cuda", local_rank=torch.cuda.device_count())
