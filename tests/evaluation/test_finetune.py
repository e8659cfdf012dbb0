"""Fine-tuning: what it learns, that it can be resumed and shared, and that the encoder stays as it is."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_trainings import (
    ALONE,
    NOWHERE,
    PLAIN,
    SPEED,
    HubModel,
    InMemory,
    Interrupted,
    coloured,
    free_port,
    interrupt_at,
    run_processes,
    small_encoder,
)
from timm.layers import DropPath

from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.evaluation.finetune import FinetuneRun, finetune
from stop_mim.evaluation.linear_sgd import LinearSGDConfig, linear_sgd
from stop_mim.models.hub_encoder import HubEncoder
from stop_mim.training.checkpoint import read_checkpoint

RICH = replace(PLAIN, drop_path=0.3, mixup=0.8, cutmix=1.0, label_smoothing=0.1, erasing_probability=0.5)


def parity(count, seed=0):
    """Two patches of four are bright or dark; the class is whether they are alike: nothing that is linear in them."""
    generator = np.random.default_rng(seed)
    bright = generator.integers(0, 2, (count, 2))
    pixels = generator.normal(128, 12, (count, 3, 16, 16))
    pixels[:, :, :8, :8] += 40 * (2 * bright[:, :1, None, None] - 1)
    pixels[:, :, 8:, 8:] += 40 * (2 * bright[:, 1:, None, None] - 1)
    source = InMemory(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)))
    return LabelledSet(source, (bright[:, 0] == bright[:, 1]).astype(np.int64), np.arange(count))


def make_run(config=PLAIN, data=None, speed=SPEED, encoder=None):
    return FinetuneRun(encoder or small_encoder(), data or coloured(96), config, ALONE, speed)


def test_it_learns_what_a_probe_of_the_frozen_encoder_cannot():
    train, test, encoder = parity(512), parity(256, seed=1), small_encoder()
    probe = LinearSGDConfig(epochs=10, batch_size=32, lrs=(0.1, 1.0), milestones=(5, 8), test_view="resize")
    frozen = dict(linear_sgd(encoder, train, test, replace(probe, train_view="resize_flip"), speed=SPEED))
    assert frozen["linear_sgd/top1"] < 75
    results = dict(finetune(encoder, train, test, replace(PLAIN, epochs=10), speed=SPEED))
    assert [*results] == ["finetune/top1", "finetune/top5", "finetune/train_loss"]
    assert results["finetune/top1"] > 95
    assert results["finetune/top5"] == 100  # There are two classes.
    assert results["finetune/train_loss"] < 0.2


def test_the_given_encoder_is_not_changed():
    encoder = small_encoder().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(finetune(encoder, coloured(64), coloured(16, seed=1), replace(RICH, epochs=1), speed=SPEED))
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not any(isinstance(module, DropPath) for module in encoder.modules())
    # Nor are the generators that others draw from. (Python's own is moved by the checks of types in tests.)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


def test_the_learning_rate_warms_up_and_falls_for_each_layer():
    run = make_run(replace(PLAIN, epochs=4, layer_decay=0.5, lowest_lr=1e-5))
    peak = 8e-3 * 32 / 256
    rates = {}
    for step in range(40):
        run._set_lr(step, 10)
        rates[step] = {group["lr_scale"]: group["lr"] for group in run.optimiser.param_groups}
    assert [rates[step][1] for step in (0, 5, 10, 39)] == pytest.approx([1e-5, (1e-5 + peak) / 2, peak, 1e-5])
    assert all(rate == pytest.approx(scale * now[1]) for now in rates.values() for scale, rate in now.items())
    assert max(now[1] for now in rates.values()) == rates[10][1]


def test_drop_path_is_seeded_by_the_step_and_changes_what_is_learned():
    weights = []
    for seed, global_seed, rate in ((0, 0, 0.5), (0, 1, 0.5), (0, 0, 0.0)):
        torch.manual_seed(global_seed)
        run = make_run(replace(PLAIN, epochs=1, drop_path=rate, seed=seed), encoder=small_encoder())
        torch.manual_seed(global_seed)
        run.train(NOWHERE, None)
        weights.append(run.classifier.encoder.vit.blocks[1].mlp.fc1.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_accumulated_gradients_are_those_of_the_whole_batch():
    runs = [make_run(replace(PLAIN, epochs=2), speed=replace(SPEED, batch_size_per_device=size)) for size in (None, 5)]
    sizes = []
    runs[1].classifier.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    for run in runs:
        run.train(NOWHERE, None)
    assert max(sizes) == 5
    assert sum(sizes) == 2 * 96
    assert runs[0].train_loss == pytest.approx(runs[1].train_loss, rel=1e-4)
    for one, other in zip(*(run.classifier.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("config", [RICH, replace(RICH, held_out_part=0.2)])
def test_a_resumed_run_is_bit_identical(tmp_path, config):
    encoder, train, test = small_encoder(), coloured(90), coloured(40, seed=1)
    config = replace(config, train_view="random_resized_crop", flip_probability=0.5)
    arguments = (encoder, train, test, config)
    whole = list(finetune(*arguments, speed=SPEED, state_file=tmp_path / "whole"))
    with pytest.raises(Interrupted):
        list(finetune(*arguments, progress=interrupt_at(8), speed=SPEED, state_file=tmp_path / "parts"))
    assert read_checkpoint(tmp_path / "parts").step == 2
    np.random.seed(99)
    random.seed(99)
    torch.manual_seed(99)
    parts = list(finetune(*arguments, speed=SPEED, state_file=tmp_path / "parts"))
    assert parts == whole
    one, other = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one.state == other.state
    assert one.tensors.keys() == other.tensors.keys()
    assert any(name.startswith("optimiser.exp_avg") for name in one.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    # A finished one is only scored again.
    assert list(finetune(*arguments, progress=interrupt_at(1), speed=SPEED, state_file=tmp_path / "whole")) == whole
    with pytest.raises(InputError, match=r"its lr is 0.008, not 0.001\): delete it"):
        list(finetune(*arguments[:3], replace(config, lr=1e-3), speed=SPEED, state_file=tmp_path / "whole"))


def test_the_last_epoch_is_taken_or_the_one_that_held_out_images_choose(monkeypatch):
    scores = iter([30.0, 50.0, 50.0, 40.0])
    run = make_run(replace(PLAIN, epochs=4, held_out_part=0.25))
    assert not {*run.used.indices} & {*run.held_out.indices}
    monkeypatch.setattr(run, "score", lambda data: [next(scores), 100.0])
    kept, step = {}, run._choose

    def remember(epochs):
        kept[epochs] = run.classifier.head.weight.detach().clone()
        step(epochs)

    monkeypatch.setattr(run, "_choose", remember)
    run.train(NOWHERE, None)
    assert (run.best_epoch, run.best_top1) == (2, 50.0)
    assert torch.equal(run.classifier.head.weight, kept[2])
    assert not torch.equal(kept[2], kept[4])
    results = dict(
        finetune(small_encoder(), coloured(96), coloured(16, seed=1), replace(PLAIN, held_out_part=0.25), speed=SPEED)
    )
    assert [*results][-2:] == ["finetune/held_out_top1", "finetune/epoch"]
    assert results["finetune/epoch"] in (1, 2, 3)


def test_a_loss_that_is_not_finite_ends_it_in_one_sentence(tmp_path):
    state = tmp_path / "state"
    with pytest.raises(TrainingDiverged, match=r"not finite in step \d+ \(.*\): lower finetune.lr \(1e\+30\)") as error:
        list(
            finetune(
                small_encoder(),
                coloured(96),
                coloured(16, seed=1),
                replace(PLAIN, lr=1e30, warmup_epochs=0.0),
                speed=SPEED,
                state_file=state,
            )
        )
    assert "\n" not in str(error.value)
    assert not state.exists()


def test_gradients_are_clipped_together():
    run = make_run(replace(PLAIN, epochs=1, clip_gradient_norm=1e-3))
    norms = []
    run.optimiser.register_step_pre_hook(
        lambda *_: norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in run.classifier.parameters() if p.grad is not None]).item()
        )
    )
    run.train(NOWHERE, None)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


def test_other_encoders_are_refused():
    with pytest.raises(
        InputError, match="The encoder is a HubEncoder: only timm's Vision Transformers can be fine-tuned"
    ):
        finetune(HubEncoder(HubModel()), coloured(32), coloured(16, seed=1), PLAIN)


def test_sets_are_checked_before_anything_is_done():
    train, test = coloured(32), coloured(16, seed=1)
    with pytest.raises(InputError, match="Class 3 of the test set"):
        finetune(small_encoder(), train.part(np.flatnonzero(train.labels != 3)), test, PLAIN)
    with pytest.raises(InputError, match="'toy' is empty"):
        train.part(np.empty(0, dtype=np.int64))


SCRIPT = """
import sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from small_trainings import PLAIN, SPEED, coloured, small_encoder
from stop_mim.evaluation.finetune import finetune
from stop_mim.training.distributed import process_group

torch.set_num_threads(1)
speed = replace(SPEED, batch_size_per_device=6)
with process_group("cpu") as ranks:
    results = list(finetune(small_encoder(), coloured(71), coloured(41, seed=1), PLAIN, ranks=ranks, speed=speed,
                            state_file=Path(sys.argv[2]) / "state2"))
    torch.save(results, Path(sys.argv[2]) / f"results.{ranks.rank}")
"""


def test_two_processes_learn_what_one_learns(tmp_path):
    run_processes(SCRIPT, tmp_path, 2, free_port())
    # 71 images in batches of 32: the last batch is uneven, 4 images in one process and 3 in the other.
    alone = dict(
        finetune(
            small_encoder(), coloured(71), coloured(41, seed=1), PLAIN, speed=SPEED, state_file=tmp_path / "state1"
        )
    )
    first, second = (torch.load(tmp_path / f"results.{rank}", weights_only=True) for rank in (0, 1))
    assert first == second
    assert dict(first)["finetune/train_loss"] == pytest.approx(alone["finetune/train_loss"], rel=1e-3)
    one, two = (read_checkpoint(tmp_path / f"state{count}").tensors for count in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.startswith("model."):
            torch.testing.assert_close(two[name], tensor, atol=2e-4, rtol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_the_gpu(tmp_path):
    encoder = small_encoder().cuda()
    config = replace(RICH, epochs=10)
    results = dict(finetune(encoder, coloured(400), coloured(100, seed=1), config, state_file=tmp_path / "state"))
    assert results["finetune/top1"] > 50
    again = dict(finetune(encoder, coloured(400), coloured(100, seed=1), config, state_file=tmp_path / "state"))
    assert again == results
