"""Checkpoints: bit-exact, whole or not there, and refused when anything about them is wrong."""

import os
import random
import re

import pytest
import torch
from safetensors.torch import save_file
from stepping import assert_same_state, make_step, state_of, take

from stop_mim.errors import InputError
from stop_mim.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoints_in,
    prune_checkpoints,
    read_checkpoint,
    restore_tensors,
    save_checkpoint,
)

MODEL_WEIGHT = "model.encoder.vit.norm.weight"
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


def test_checkpoints_are_found_by_number_and_pruned_but_for_milestones(tmp_path):
    for step in (20, 3, 6, 100000000, 99999999):
        checkpoint_path(tmp_path, step).write_text("")
    strangers = {"step-abc.safetensors", "encoder.safetensors", ".step-00000004.safetensors.x", "step-5.pt"}
    for stranger in strangers:
        (tmp_path / stranger).write_text("")
    assert list(checkpoints_in(tmp_path)) == [3, 6, 20, 99999999, 100000000]
    assert checkpoints_in(tmp_path)[20] == tmp_path / "step-00000020.safetensors"
    prune_checkpoints(tmp_path, keep=1, milestone_every_steps=6)
    assert list(checkpoints_in(tmp_path)) == [6, 100000000]
    assert {file.name for file in tmp_path.iterdir()} > strangers


@pytest.mark.parametrize(
    "name", [MODEL_WEIGHT, "model.extra", "optimiser.exp_avg.encoder.vit.norm.weight", "optimiser.step.extra"]
)
def test_a_checkpoint_that_does_not_fit_is_refused(name):
    step, other = make_step(), make_step()
    take(step, [0])
    tensors = state_of(step)
    restore_tensors(Checkpoint(9, tensors, {}), other.objective, other.optimiser)
    assert_same_state(state_of(other), tensors)
    for wrong in (tensors | {name: torch.zeros(3, 5, 7)}, {k: v for k, v in tensors.items() if k != MODEL_WEIGHT}):
        with pytest.raises(InputError, match="checkpoint of step 9 does not fit this run"):
            restore_tensors(Checkpoint(9, wrong, {}), other.objective, other.optimiser)
