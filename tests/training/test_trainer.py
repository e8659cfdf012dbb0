"""The loop on a toy model: callbacks, interruption, divergence, and checkpoints of any training."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from stop_mim.errors import TrainingDiverged
from stop_mim.interruption import catch_interruption
from stop_mim.training.callbacks.checkpoint import SaveCheckpoint
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.distributed import Ranks
from stop_mim.training.trainer import STOP_MESSAGE, Callback, Trainer

STEPS_PER_EPOCH, TOTAL = 4, 12


class LinearStep:
    """SGD on a linear model, with dropout from the step's seed: labelled batches and a schedule of its own."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)

    def __call__(self, batch, lr, seed):
        inputs, labels = batch
        self.optimiser.param_groups[0]["lr"] = lr
        kept = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
        loss = nn.functional.cross_entropy(self.model(inputs * kept), labels)
        self.optimiser.zero_grad()
        loss.backward()
        finite = torch.isfinite(loss)
        if finite:
            self.optimiser.step()
        return torch.stack([loss.detach(), loss.detach(), finite.float()])


class BestEpoch(Callback):
    """What fine-tuning does: measures at the end of every epoch and remembers the best weights."""

    name = "best"
    on_every_rank = True

    def __init__(self):
        self.best, self.weights = float("inf"), torch.zeros(2, 3)

    def needs_outcomes(self, step):
        return step % STEPS_PER_EPOCH == 0

    def after_step(self, trainer, batch, outcomes):
        if self.needs_outcomes(trainer.done) and trainer.loss < self.best:
            self.best, self.weights = trainer.loss, trainer.model.weight.detach().clone()

    def state(self):
        return {"best": self.best}

    def tensors(self):
        return {"best.weights": self.weights}

    def restore(self, state, tensors):
        self.best, self.weights = state["best"], tensors["best.weights"]


def labelled_batches(first, not_finite=()):
    for number in range(first, 10**6):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 3, generator=generator)
        yield inputs * float("nan") if number in not_finite else inputs, (inputs[:, 0] > 0).long()


def make_trainer(*callbacks, batches=labelled_batches, **options):
    step = LinearStep()
    return Trainer(step, batches, lambda n: 0.1 / (1 + n), TOTAL, step.model, step.optimiser, callbacks, **options)


def test_a_training_of_any_kind_is_resumed_bit_for_bit(tmp_path):
    def saving(name):
        return SaveCheckpoint(tmp_path / name, every_steps=STEPS_PER_EPOCH, run={"model": "linear"})

    make_trainer(BestEpoch(), saving("whole")).run()
    make_trainer(BestEpoch(), saving("parts")).run(end=6)
    assert read_checkpoint(tmp_path / "parts").step == 6
    best = BestEpoch()
    resumed = make_trainer(best, saving("parts"))
    resumed.restore(read_checkpoint(tmp_path / "parts"))
    assert best.best < float("inf")
    resumed.run()
    whole, parts = read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "parts")
    assert (whole.step, whole.state) == (parts.step, parts.state) == (TOTAL, whole.state)
    assert whole.tensors.keys() == parts.tensors.keys() >= {"model.weight", "best.weights"}
    assert all(torch.equal(tensor, parts.tensors[name]) for name, tensor in whole.tensors.items())
    assert whole.state["run"] == {"model": "linear"}


class Recording(Callback):
    def __init__(self, reads_at=()):
        self.reads_at, self.seen = reads_at, []

    def start(self, trainer):
        self.seen.append("start")

    def needs_outcomes(self, step):
        return step in self.reads_at

    def after_step(self, trainer, batch, outcomes):
        self.seen.append(len(outcomes))

    def end(self, trainer):
        self.seen.append("end" if trainer.error is None else f"failed in step {trainer.done + 1}")


def test_outcomes_are_read_only_where_a_callback_asks_for_them_and_at_the_end():
    callback = Recording(reads_at={3, 4})
    # Any device but the CPU, where outcomes are at hand after every step.
    make_trainer(callback, ranks=Ranks(0, 1, 1, torch.device("meta"))).run()
    assert callback.seen == ["start", 0, 0, 3, 1, *[0] * 7, 8, "end"]


def test_on_other_processes_only_those_callbacks_run_that_are_meant_to():
    here, everywhere = Recording(), BestEpoch()
    make_trainer(here, everywhere, ranks=Ranks(1, 1, 1, torch.device("cpu"))).run()
    assert here.seen == []
    assert everywhere.best < float("inf")


class FullDisk(Callback):
    def end(self, trainer):
        raise OSError("No space left on device")


def test_callbacks_and_batches_end_with_a_training_that_fails():
    def failing(first):
        try:
            yield from (next(good) for _ in range(5))
            raise OSError("no more images")
        finally:
            callback.seen.append("closed")

    callback, good = Recording(), labelled_batches(0)
    with pytest.raises(OSError, match="no more images"):
        make_trainer(callback, FullDisk(), batches=failing).run()
    assert callback.seen == ["start", *[1] * 5, "closed", "failed in step 6"]
    with pytest.raises(OSError, match="No space left"):
        make_trainer(FullDisk()).run()


def test_steps_that_are_not_finite_are_counted_and_too_many_in_a_row_end_the_training():
    warnings = []

    def run(steps, **options):
        trainer = make_trainer(
            batches=lambda first: labelled_batches(first, steps), warn=warnings.append, remedy="lower lr", **options
        )
        trainer.run()
        return trainer

    assert run({0, 1, 2, 3, 5}).not_finite == 5
    assert len(warnings) == 5
    assert "Step 6" in warnings[-1]
    with pytest.raises(TrainingDiverged, match="5 steps in a row, up to step 8: lower lr"):
        run(range(3, 12))
    with pytest.raises(TrainingDiverged, match="step 4"):
        run({3}, max_not_finite=1)


def test_ctrl_c_is_answered_at_once_and_a_second_one_ends_as_usual(capfd):
    # A shell starts its background jobs with Ctrl-C ignored, and the tests may be one of them.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with catch_interruption(STOP_MESSAGE) as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert STOP_MESSAGE in capfd.readouterr().err
            assert interruption.signal_name == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_can_train_though_they_cannot_catch_signals():
    trainer = make_trainer()
    thread = threading.Thread(target=trainer.run)
    thread.start()
    thread.join()
    assert trainer.done == TOTAL
