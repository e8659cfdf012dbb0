"""Sharded models (FSDP2): the training of one process, its checkpoints, and what is sent between processes."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tiny_run import checkpoint_at, go_on, run, tiny_config, tiny_objective, train_in, write_colours
from torch.distributed.tensor.debug import CommDebugMode

from stop_mim.errors import InputError
from stop_mim.exchange.loading import load_encoder
from stop_mim.training import pretrain
from stop_mim.training.acceleration import require_possible
from stop_mim.training.callbacks.checkpoint import SaveShardedRun
from stop_mim.training.checkpoint import SUFFIX, checkpoint_path, checkpoints_in, read_checkpoint
from stop_mim.training.config import PositionsConfig, ProbeConfig, SpeedConfig
from stop_mim.training.distributed import Ranks, device_mesh, process_group
from stop_mim.training.inputs import StepInputs
from stop_mim.training.run_folder import read_metrics

STEPS = 5


def wanted(sharding, colours=None, stop=STEPS, **speed):
    config = tiny_config(
        "scenes:count=24,size=32",
        speed=SpeedConfig("cpu", workers=0, sharding=sharding, **speed),
        positions=PositionsConfig(sigma=1.0),
        stop_after_steps=stop,
    )
    probe = config.probe if colours is None else ProbeConfig(str(colours), batch_size=8, score_every_steps=STEPS)
    return replace(config, probe=probe, optim=replace(config.optim, clip_gradient_norm=0.2))


def newest(folder):
    *_, path = checkpoints_in(folder / "checkpoints").values()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    colours = write_colours(folder / "colours", splits=(("train", 4), ("test", 2)))
    run(replace(wanted("none", colours), out=str(folder / "one")))
    full = wanted("full", colours, batch_size_per_device=2, recompute=True)
    assert run_ranks(2, train_in, folder / "full", full) == [0, 0]
    changing = folder / "changing"
    hybrid = wanted("hybrid", stop=2, reshard=False)
    assert run_ranks(4, train_in, changing, hybrid, False, None, 2) == [0] * 4
    assert run_ranks(2, train_in, changing, wanted("full", stop=3), True) == [0, 0]
    assert newest(changing).suffix == SUFFIX
    go_on(changing, speed=wanted("none").speed, stop_after_steps=4)
    assert newest(changing).suffix == ".safetensors"
    assert run_ranks(2, train_in, changing, wanted("full"), True) == [0, 0]
    return folder


@pytest.mark.parametrize("name", ["full", "changing"])
def test_a_sharded_model_trains_as_a_whole_one(runs, name):
    losses, others = ([line["loss"] for line in read_metrics(runs / run)] for run in ("one", name))
    assert others == pytest.approx(losses, rel=1e-6)
    ours, theirs = checkpoint_at(runs / "one", STEPS), read_checkpoint(newest(runs / name))
    assert theirs.step == STEPS
    names = {one for one in ours.tensors if not one.startswith("probe.")}
    assert names == {one for one in theirs.tensors if not one.startswith("probe.")}
    for one in names:
        torch.testing.assert_close(theirs.tensors[one], ours.tensors[one], rtol=1e-4, atol=1e-6, msg=one)


def test_the_main_process_measures_a_sharded_model(runs):
    one, full = (read_metrics(runs / name)[-1] for name in ("one", "full"))
    assert full.keys() == one.keys() >= {"health/rankme", "health/ema_distance", "probe/linear_top1"}
    # Features are those of the main process's images.
    same = [
        name for name in one if name.startswith(("health/", "probe/")) and name[7:] not in ("feature_std", "rankme")
    ]
    assert [full[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-3)


def test_the_encoder_of_a_sharded_run_is_one_file_and_that_of_any_checkpoint(runs):
    file, shards = (load_encoder(path).state_dict() for path in (runs / "full", newest(runs / "full")))
    saved = read_checkpoint(newest(runs / "full")).tensors
    for name, tensor in file.items():
        assert torch.equal(tensor, shards[name])
        assert torch.equal(tensor, saved[f"model.target.{name}"])


def test_an_encoder_that_is_written_in_the_background_is_a_copy():
    saver = object.__new__(SaveShardedRun)
    saver.encoder = tiny_objective().frozen
    ours = {tensor.data_ptr() for tensor in saver.encoder.state_dict().values()}
    assert ours.isdisjoint(tensor.data_ptr() for tensor in saver._whole_encoder().values())


def test_a_process_that_resumes_reads_no_whole_tensor_of_the_model(runs):
    saved = read_checkpoint(newest(runs / "full"), whole=False)
    for name, tensor in saved.tensors.items():
        assert tensor.is_meta == name.startswith(("model.", "optimiser.")), name


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_shard_is_refused(runs, damage):
    path = checkpoint_path(runs / "full" / "checkpoints", 4, SUFFIX)
    read_checkpoint(path)
    shard = sorted(path.glob("*.safetensors"))[0]
    before = shard.read_bytes()
    if damage == "flipped":
        shard.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    else:
        shard.unlink()
    with pytest.raises(InputError, match=f"{path.name} cannot be read"):
        read_checkpoint(path)
    shard.write_bytes(before)


def count_messages():
    """In a process of two: the target moves without a message, which a step does not."""
    with process_group(SpeedConfig("cpu")) as ranks:
        config = wanted("full")
        inputs = StepInputs(config, ranks)
        parts = pretrain.assemble(inputs, inputs.open_images(), print, print)
        objective = parts.objective
        for ours, theirs in zip(objective.encoder.parameters(), objective.target.parameters(), strict=True):
            assert ours.placements == theirs.placements
        with CommDebugMode() as messages:
            parts.trainer.take_step(parts.trainer.batches(0))
        assert messages.get_total_counts() > 0
        before = objective.target.vit.patch_embed.proj.weight.to_local().clone()
        with CommDebugMode() as messages:
            objective.move_target(torch.tensor(0.5))
        assert messages.get_total_counts() == 0
        assert not torch.equal(objective.target.vit.patch_embed.proj.weight.to_local(), before)


def test_the_target_is_sharded_as_its_encoder_and_moves_without_a_message():
    assert run_ranks(2, count_messages) == [0, 0]


def test_what_sharding_cannot_do_is_refused():
    cpu = torch.device("cpu")
    for option in ("compile", "graph"):
        with pytest.raises(InputError, match=f"leave speed.{option} out"):
            require_possible(SpeedConfig(sharding="full", **{option: True}), Ranks(0, 1, 1, cpu))
    with pytest.raises(InputError, match="6 processes are not a multiple of the 4"):
        device_mesh(Ranks(0, 6, 4, cpu), "hybrid")


@pytest.mark.gpu
def test_a_sharded_model_on_one_gpu_trains_as_a_whole_one(tmp_path):
    losses = {}
    for name, sharding in (("one", "none"), ("full", "full")):
        speed = SpeedConfig("cuda", workers=0, sharding=sharding, compile=False, graph=False)
        config = replace(wanted(sharding), speed=speed, out=str(tmp_path / name), stop_after_steps=3)
        run(config)
        go_on(tmp_path / name, speed=speed, stop_after_steps=STEPS)
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert len(losses["one"]) == STEPS
    assert losses["full"] == pytest.approx(losses["one"], rel=0.01)
