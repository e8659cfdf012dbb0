"""Linear heads by SGD in parts: stopped and resumed, refused with another's state, shared by two processes."""

from dataclasses import replace

import pytest
import torch
from small_trainings import (
    PRECONDITIONED,
    QUICK,
    SPEED,
    Interrupted,
    coloured,
    free_port,
    interrupt_at,
    run_processes,
    small_encoder,
)

from stop_mim.errors import InputError
from stop_mim.evaluation.linear_sgd import linear_sgd
from stop_mim.training.checkpoint import read_checkpoint


@pytest.mark.parametrize(("loader", "preconditioned"), [("resident", False), ("streaming", False), ("streaming", True)])
def test_a_resumed_run_is_bit_identical(encoder, tmp_path, loader, preconditioned):
    train, test = coloured(90, together=False), coloured(40, seed=1)
    config = replace(QUICK, schedule="cosine", train_view="random_resized_crop", lrs=(0.5, 0.1))
    config = replace(config, preconditioned=preconditioned)
    speed = replace(SPEED, loader=loader)
    whole = list(linear_sgd(encoder, train, test, config, speed=speed, state_file=tmp_path / "whole"))
    for step in (8, 11):  # In the third and in the fourth epoch, of three steps each.
        with pytest.raises(Interrupted):
            list(
                linear_sgd(
                    encoder,
                    train,
                    test,
                    config,
                    progress=interrupt_at(step),
                    speed=speed,
                    state_file=tmp_path / "parts",
                )
            )
        assert read_checkpoint(tmp_path / "parts").step == (step - 1) // 3
    parts = list(linear_sgd(encoder, train, test, config, speed=speed, state_file=tmp_path / "parts"))
    assert parts == whole
    one, other = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one.step == other.step == 4
    assert one.tensors.keys() == other.tensors.keys()
    assert any(name.startswith("optimiser.momentum_buffer") for name in one.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_finished_run_is_only_scored_again(encoder, sets, tmp_path):
    state, told = tmp_path / "state", []
    first = list(linear_sgd(encoder, *sets, replace(QUICK, epochs=1), speed=SPEED, state_file=state))
    again = linear_sgd(
        encoder,
        *sets,
        replace(QUICK, epochs=1),
        progress=lambda done, total: told.append(done),
        speed=SPEED,
        state_file=state,
    )
    assert list(again) == first
    assert not told


def test_a_state_of_another_evaluation_or_a_damaged_one_is_refused(encoder, sets, tmp_path):
    state = tmp_path / "state"
    config = replace(QUICK, epochs=1)
    list(linear_sgd(encoder, *sets, config, speed=SPEED, state_file=state))
    saved = state.read_bytes()
    larger = small_encoder()
    larger.image_size = (32, 32)
    others = [
        ((encoder, *sets, replace(config, weight_decay=0.1)), r"its weight_decay is 0.0005, not 0.1\): delete it"),
        ((small_encoder(seed=1), *sets, config), "its encoder is"),
        ((larger, *sets, config), r"its image_size is \[16, 16\], not \[32, 32\]"),
        ((encoder, sets[1], sets[1], config), "its images is"),
    ]
    for arguments, message in others:
        with pytest.raises(InputError, match=message):
            list(linear_sgd(*arguments, speed=SPEED, state_file=state))
    assert state.read_bytes() == saved
    state.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    with pytest.raises(InputError, match=r"holds no state to go on from \(.*checksum.*\): delete it to begin anew"):
        list(linear_sgd(encoder, *sets, config, speed=SPEED, state_file=state))


def test_progress_counts_all_steps(encoder, sets):
    told = []
    list(linear_sgd(encoder, *sets, QUICK, progress=lambda done, total: told.append((done, total)), speed=SPEED))
    assert told == [(step, 40) for step in range(1, 41)]


SCRIPT = """
import sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from small_trainings import PRECONDITIONED, QUICK, SPEED, coloured, small_encoder
from stop_mim.evaluation.linear_sgd import linear_sgd
from stop_mim.training.distributed import process_group

torch.set_num_threads(1)
config = {"QUICK": QUICK, "PRECONDITIONED": PRECONDITIONED}[sys.argv[3]]
config = replace(config, epochs=2, flip_probability=0.0, held_out_part=0.1)
with process_group("cpu") as ranks:
    results = list(linear_sgd(small_encoder(), coloured(79), coloured(41, seed=1), config, ranks=ranks, speed=SPEED,
                              state_file=Path(sys.argv[2]) / f"state{ranks.world_size}"))
    torch.save(results, Path(sys.argv[2]) / f"results{ranks.world_size}.{ranks.rank}")
"""


@pytest.mark.parametrize(("name", "config"), [("QUICK", QUICK), ("PRECONDITIONED", PRECONDITIONED)])
def test_two_processes_learn_what_one_learns(tmp_path, name, config):
    run_processes(SCRIPT, tmp_path, 2, free_port(), name)
    config = replace(config, epochs=2, flip_probability=0.0, held_out_part=0.1)
    # 71 images in batches of 32: the last batch is uneven, 4 images in one process and 3 in the other.
    alone = list(
        linear_sgd(
            small_encoder(), coloured(79), coloured(41, seed=1), config, speed=SPEED, state_file=tmp_path / "state1"
        )
    )
    first, second = (torch.load(tmp_path / f"results2.{rank}", weights_only=True) for rank in (0, 1))
    assert first == second
    assert [name for name, _ in first] == [name for name, _ in alone]
    one, two = (read_checkpoint(tmp_path / f"state{count}").tensors for count in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Running statistics among them: those of all images, not of one process's.
        # Where features hardly vary, preconditioned steps are long, and so are their rounding errors.
        tolerance = 1e-3 * tensor.abs().max().item() if config.preconditioned else 2e-5
        torch.testing.assert_close(two[name], tensor, atol=tolerance, rtol=1e-3)
