"""The training loop of pretraining, linear-sgd, fine-tuning and the benchmark.

    trainer = Trainer(step, batches, schedule, total_steps, model, optimiser, callbacks)
    trainer.run()

A step updates the model; callbacks do the rest: metrics, health, probe, progress and checkpoints.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stop_mim.errors import TrainingDiverged
from stop_mim.interruption import Interruption, catch_interruption
from stop_mim.seeds import derive_seed
from stop_mim.training.checkpoint import Checkpoint, collect_tensors, restore_tensors
from stop_mim.training.distributed import Ranks, any_rank, wait_for_all
from stop_mim.training.step import Outcome, StepOutcome, read_outcomes
from stop_mim.training.watch import watch

MAX_NOT_FINITE_IN_A_ROW = 5
STOP_MESSAGE = "Stopping after this step; Ctrl-C again quits without saving."

Step = Callable[[Any, Any, int], Outcome]
"""(batch, scheduled values, seed) -> loss, norm of the gradient and whether the weights were updated, on the device."""


class Callback:
    """Base class of hooks that a `Trainer` calls; every method is optional.

    `start`, `after_step` and `end` are called in the main process, and in all processes if `on_every_rank` is set. A callback
    that saves state or tensors needs a `name`, under which checkpoints keep its state.
    """

    name: ClassVar[str] = ""
    on_every_rank: bool = False

    def start(self, trainer: "Trainer") -> None:
        """Prepare for the first step of this session."""

    def needs_outcomes(self, step: int) -> bool:
        """Return whether this callback needs the outcomes after this step; reading them waits for the device.

        It must return the same in all processes.
        """
        return False

    def after_step(self, trainer: "Trainer", batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        """Called after a step; `outcomes` has all steps since the last reading, and is empty if nothing is read now."""

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint, under names that no other callback has."""
        return {}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Continue from the state and all tensors of a checkpoint; the state is empty if there was no such callback."""

    def end(self, trainer: "Trainer") -> None:
        """Clean up after the last step of this session, or after `trainer.error`."""


class Trainer:
    """Takes steps until the end, an interruption or a divergence.

    Args:
        step: one update of the model, see `Step`.
        batches: returns the batches from a given step on; the generator is closed at the end.
        schedule: the scheduled values of a step.
        total_steps: length of the whole run, over all sessions.
        model, optimiser: what `checkpoint` saves and `restore` loads.
        callbacks: called in this order.
        ranks: this process among all; default: one process on the CPU.
        seed: each step gets a seed derived from this one and its number, the same in all processes.
        warn: shows a warning.
        max_not_finite: steps in a row without a finite loss after which TrainingDiverged is raised.
        remedy: what its message advises.
    """

    def __init__(
        self,
        step: Step,
        batches: Callable[[int], Generator[Any]],
        schedule: Callable[[int], Any],
        total_steps: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        callbacks: Sequence[Callback] = (),
        ranks: Ranks | None = None,
        seed: int = 0,
        warn: Callable[[str], None] = print,
        max_not_finite: int = MAX_NOT_FINITE_IN_A_ROW,
        remedy: str = "lower the learning rate",
    ) -> None:
        self.step, self.batches, self.schedule, self.total_steps = step, batches, schedule, total_steps
        self.model, self.optimiser, self.callbacks = model, optimiser, list(callbacks)
        self.ranks, self.seed, self.warn = ranks or Ranks(0, 1, 1, torch.device("cpu")), seed, warn
        self.max_not_finite, self.remedy = max_not_finite, remedy
        self.done, self.last_step = 0, total_steps
        self.not_finite, self.not_finite_in_a_row = 0, 0
        self.loss = float("nan")
        """The loss of the last step that updated the weights, as far as outcomes have been read."""
        self.values: Any = None
        """The scheduled values of the last step."""
        self.measurements: dict[str, float] = {}
        """What callbacks measured after the last step."""
        self.interrupted_by: str | None = None
        self.error: BaseException | None = None

    @property
    def stops(self) -> bool:
        """Whether this session ends after the step just taken."""
        return self.done == self.last_step or self.interrupted_by is not None

    def run(self, end: int | None = None) -> None:
        """Train until `end` steps of the whole run are done; default: `total_steps`."""
        self.last_step = self.total_steps if end is None else min(self.total_steps, end)
        self.interrupted_by, self.error = None, None
        # torchrun sends SIGTERM to all processes when one is killed: the others must still report why they end. Only the main
        # process prints the message.
        with catch_interruption(STOP_MESSAGE if self.ranks.is_main else "") as interruption:
            try:
                with watch.explaining():
                    for callback in self._active():
                        callback.start(self)
                    with closing(self.batches(self.done)) as batches:
                        self._train(batches, interruption)
                    watch.mark("the end of the training")
                    wait_for_all(self.ranks)
            except BaseException as error:
                self.error = error
                raise
            finally:
                self._end()

    def _end(self) -> None:
        """End all callbacks, even if one of them raises; after an error, such as a full disk, an OSError here adds nothing."""
        with nullcontext() if self.error is None else suppress(OSError), ExitStack() as ends:
            # An ExitStack calls the last one first.
            for callback in reversed(self._active()):
                ends.callback(callback.end, self)

    def _train(self, batches: Iterator[Any], interruption: Interruption) -> None:
        unread: list[Outcome] = []
        while self.done < self.last_step and self.interrupted_by is None:
            batch, outcome = self.take_step(batches)
            unread.append(outcome)
            # Reading waits for the device, except on the CPU.
            needed = any(callback.needs_outcomes(self.done) for callback in self.callbacks)
            read_now = needed or self.ranks.device.type == "cpu" or self.done == self.last_step
            # Several processes agree to stop only where all of them read.
            if (read_now or self.ranks.world_size == 1) and any_rank(bool(interruption), self.ranks):
                self.interrupted_by = interruption.signal_name or "another process"
            outcomes: list[StepOutcome] = []
            if read_now or self.stops:
                outcomes, unread = read_outcomes(unread), []
                self._count_not_finite(outcomes)
            watch.mark(f"step {self.done}, after the update")
            for callback in self._active():
                callback.after_step(self, batch, outcomes)

    def take_step(self, batches: Iterator[Any]) -> tuple[Any, Outcome]:
        """Take one step; return its batch, and its outcome on the device."""
        self.values, self.measurements = self.schedule(self.done), {}
        watch.mark(f"step {self.done + 1}, reading images")
        batch = next(batches)
        watch.mark(f"step {self.done + 1}, in the update")
        # 0: the first virtual shard of the noise; the step derives the seeds of the others.
        outcome = self.step(batch, self.values, derive_seed(self.seed, "step", self.done, 0))
        self.done += 1
        return batch, outcome

    def _count_not_finite(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count steps that were skipped because their loss or gradient was not finite; raise after too many in a row."""
        for number, outcome in enumerate(outcomes, start=self.done - len(outcomes) + 1):
            if outcome.updated:
                self.loss, self.not_finite_in_a_row = outcome.loss, 0
                continue
            self.not_finite += 1
            self.not_finite_in_a_row += 1
            self.warn(f"Step {number}: the loss or its gradient is not finite ({outcome.loss}); the step was skipped.")
            if self.not_finite_in_a_row >= self.max_not_finite:
                many = f" for {self.max_not_finite} steps in a row, up to" if self.max_not_finite > 1 else " in"
                raise TrainingDiverged(f"The loss was not finite{many} step {number}: {self.remedy}.")

    def _active(self) -> list[Callback]:
        return [callback for callback in self.callbacks if self.ranks.is_main or callback.on_every_rank]

    def checkpoint(self, run: dict[str, Any]) -> Checkpoint:
        """Return everything needed to continue, with `run`: plain values that identify what is being trained."""
        state = {"run": run, "not_finite": self.not_finite, "not_finite_in_a_row": self.not_finite_in_a_row}
        tensors = collect_tensors(self.model, self.optimiser)
        for callback in self.callbacks:
            if callback.name:
                tensors |= callback.tensors()
                state[callback.name] = callback.state()
        return Checkpoint(self.done, tensors, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        watch.mark("start-up, loading the checkpoint")
        restore_tensors(checkpoint, self.model, self.optimiser)
        self.done, self.not_finite = checkpoint.step, checkpoint.state["not_finite"]
        self.not_finite_in_a_row = checkpoint.state["not_finite_in_a_row"]
        for callback in self.callbacks:
            if callback.name:
                callback.restore(checkpoint.state.get(callback.name, {}), checkpoint.tensors)
