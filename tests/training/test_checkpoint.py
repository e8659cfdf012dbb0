"""Checkpoints: bit-exact, whole or not there, and refused when anything about them is wrong."""

import os
import random
import re

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import CPU, tiny_config, tiny_objective

from stop_mim.errors import InputError
from stop_mim.masking import MultiBlockMasks
from stop_mim.training import checkpoint as checkpoint_module
from stop_mim.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoints_in,
    collect_tensors,
    prune_checkpoints,
    read_checkpoint,
    restore_tensors,
    save_checkpoint,
)
from stop_mim.training.step import make_optimiser

STATE = {"seed": 3, "ratio": 0.1, "nothing": None, "nested": {"name": "ψ"}}


def small():
    generator = torch.Generator().manual_seed(0)
    return Checkpoint(
        12,
        {
            "weights": torch.randn(5, 3, generator=generator),
            "half": torch.randn(4, generator=generator).bfloat16(),
            "count": torch.tensor(7),
            "flags": torch.tensor([True, False]),
            "odd": torch.tensor([float("inf"), -0.0, float("nan"), 1e-42]),
            "view": torch.arange(12.0).reshape(3, 4).T,
        },
        STATE,
    )


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def trained(seed=0, steps=2, **groups):
    """An objective with an optimiser that has made some steps."""
    objective = tiny_objective(seed, **groups)
    optimiser = make_optimiser(objective, tiny_config().optim, CPU)
    for step in range(steps):
        torch.manual_seed(step)
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        optimiser.zero_grad()
        torch.manual_seed(step)
        objective(images, MultiBlockMasks(4).sample(4, generator=generator)).backward()
        optimiser.step()
        objective.move_target(0.1)
    return objective, optimiser


def test_everything_comes_back_bit_for_bit(tmp_path):
    before = small()
    save_checkpoint(before, tmp_path / "a.safetensors")
    after = read_checkpoint(tmp_path / "a.safetensors")
    assert (after.step, after.state) == (12, STATE)
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        assert after.tensors[name].dtype == tensor.dtype
        assert after.tensors[name].shape == tensor.shape
        assert torch.equal(bits(after.tensors[name]), bits(tensor)), name


def refuse(path):
    with pytest.raises(InputError, match=re.escape(str(path))) as error:
        read_checkpoint(path)
    return str(error.value)


def test_a_flipped_bit_anywhere_and_a_truncated_file_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(small(), path)
    whole = path.read_bytes()
    chance = random.Random(0)
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        refuse(path)
    for kept in (0, 4, 100, -1, -200):
        path.write_bytes(whole[:kept])
        refuse(path)
    path.write_bytes(whole)
    read_checkpoint(path)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for write in (
        lambda: save_file({"weight": torch.zeros(3)}, path, {"format": "pt"}),
        lambda: torch.save({"weight": torch.zeros(3)}, path),
        lambda: path.write_bytes(b""),
        lambda: (path.unlink(), os.mkfifo(path)),
    ):
        write()
        refuse(path)
    path.unlink()
    save_file({}, path, {"format": "stop-mim checkpoint 2"})
    assert "newer version" in refuse(path)
    assert "--checkpoint" in refuse(tmp_path / "missing.safetensors")
    refuse(tmp_path)


def test_a_crash_while_saving_keeps_the_last_good_one(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_checkpoint(small(), path)
    real = checkpoint_module.save_file

    def crash(tensors, file, metadata):
        real(tensors, file, metadata)
        file.write_bytes(file.read_bytes()[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "save_file", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(Checkpoint(13, {"weights": torch.ones(2)}, {}), path)
    assert read_checkpoint(path).step == 12
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def touch(folder, *steps):
    folder.mkdir(exist_ok=True)
    for step in steps:
        checkpoint_path(folder, step).write_text("")


def test_checkpoints_are_found_by_number(tmp_path):
    touch(tmp_path, 20, 3, 100000000, 99999999)
    for stranger in ("step-abc.safetensors", "encoder.safetensors", ".step-00000004.safetensors.x", "step-5.pt"):
        (tmp_path / stranger).write_text("")
    assert list(checkpoints_in(tmp_path)) == [3, 20, 99999999, 100000000]
    assert checkpoints_in(tmp_path)[20] == tmp_path / "step-00000020.safetensors"
    assert checkpoints_in(tmp_path / "missing") == {}


def test_pruning_keeps_milestones_and_whatever_is_no_checkpoint(tmp_path):
    touch(tmp_path, 4, 6, 10, 12, 14, 16)
    (tmp_path / "notes.txt").write_text("")
    prune_checkpoints(tmp_path, keep=1, milestone_every_steps=6)
    assert list(checkpoints_in(tmp_path)) == [6, 12, 16]
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.vit.norm.weight",
        "model.extra",
        "optimiser.exp_avg.encoder.vit.norm.weight",
        "optimiser.step.extra",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(name):
    tensors = collect_tensors(*trained(steps=1))
    restore_tensors(Checkpoint(9, tensors, {}), *trained(seed=1, steps=0))
    with pytest.raises(InputError, match="checkpoint of step 9 does not fit this run"):
        restore_tensors(Checkpoint(9, tensors | {name: torch.zeros(3, 5, 7)}, {}), *trained(seed=1, steps=0))
