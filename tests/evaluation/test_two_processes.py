"""Linear heads and fine-tuning learn in two processes what they learn in one."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from small_trainings import ALONE, CONDITIONS, NEWTON, PLAIN, SPEED, WHOLE, coloured, small_encoder

from stop_mim.data import image_source
from stop_mim.evaluation.finetuning import FinetuneTraining
from stop_mim.evaluation.linear_heads import LinearTraining
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import process_group

SGD, SHORT = replace(WHOLE, epochs=1, milestones=(), weight_decay=0.01), replace(NEWTON, epochs=1, weight_decay=0.01)
ONE_EPOCH = replace(PLAIN, epochs=1, warmup_epochs=0.0)


def train(ranks, folder):
    """Train each kind, keep its state in the folder, and return losses and accuracies."""
    conditions = replace(CONDITIONS, ranks=ranks, speed=replace(SPEED, batch_size_per_device=6))
    torn = coloured(71, bad=(40,), together=False)
    # 75 of 150, and 71, images in batches of 32: the last batch is uneven.
    trainings = {
        name: LinearTraining(small_encoder(), coloured(150), 32, replace(conditions, protocol=protocol))
        for name, protocol in (("sgd", SGD), ("newton", SHORT))
    } | {"finetune": FinetuneTraining(small_encoder(), torn, ONE_EPOCH, conditions)}
    found = {}
    for name, training in trainings.items():
        training.train(folder / f"{name}{ranks.world_size}")
        # The second process has no image of the last of these.
        test, last = coloured(41, seed=1), coloured(1, seed=2)
        found[name] = training.score(test), training.score(last)
        found[f"{name}, unreadable"] = [sorted(training.unreadable[data.source]) for data in (training.used, test)]
    return found | {"loss": trainings["finetune"].train_loss}


def train_in_two(folder):
    """In a process of two."""
    image_source.MAX_BAD_FRACTION = 0.5
    with process_group(DeviceConfig("cpu")) as ranks:
        torch.save(train(ranks, folder), folder / f"results.{ranks.rank}")


def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(image_source, "MAX_BAD_FRACTION", 0.5)
    assert run_ranks(2, train_in_two, tmp_path) == [0, 0]
    alone = train(ALONE, tmp_path)
    first, second = (torch.load(tmp_path / f"results.{rank}", weights_only=True) for rank in (0, 1))
    assert first == second
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    unreadable = [name for name in alone if name.endswith("unreadable")]
    assert (
        [first[name] for name in unreadable] == [alone[name] for name in unreadable] == [[[], []], [[], []], [[40], []]]
    )
    # Where features hardly vary, preconditioned steps are long, and so are their rounding errors.
    for name, tolerance, relative in (("sgd", 0.0, 1e-3), ("newton", 1e-3, 1e-3), ("finetune", 1e-3, 1e-2)):
        one, two = (read_checkpoint(tmp_path / f"{name}{count}").tensors for count in (1, 2))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            if name != "finetune" or key.startswith("model."):
                atol = max(2e-5, tolerance * tensor.abs().max().item())
                torch.testing.assert_close(two[key], tensor, atol=atol, rtol=relative)
