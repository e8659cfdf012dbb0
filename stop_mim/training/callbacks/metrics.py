"""Metrics of a run: lines of metrics.jsonl."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from stop_mim.training.run_folder import RunFolder
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer


class RecordMetrics(Callback):
    """Writes a line of measurements every `every_steps` steps, and after each measurement of the callbacks `also_at`.

    The loss of a line is the mean since the line before. Its losses are kept in checkpoints, so that lines are the same
    wherever a run was stopped; a run that stops between two lines writes one more.
    """

    name = "metrics"

    def __init__(
        self,
        folder: RunFolder,
        every_steps: int,
        images_per_step: int,
        steps_per_epoch: int,
        also_at: Sequence[Callback] = (),
    ) -> None:
        self.folder, self.every_steps, self.also_at = folder, every_steps, also_at
        self.images_per_step, self.steps_per_epoch = images_per_step, steps_per_epoch
        self._losses: list[float] = []
        self._gradient_norm = float("nan")

    def start(self, trainer: Trainer) -> None:
        self._restart_clock()

    def needs_outcomes(self, step: int) -> bool:
        return step % self.every_steps == 0 or any(callback.needs_outcomes(step) for callback in self.also_at)

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        self._steps += len(outcomes)
        for outcome in outcomes:
            self._gradient_norm = outcome.gradient_norm
            if outcome.updated:
                self._losses.append(outcome.loss)
        due = self.needs_outcomes(trainer.done)
        if due or trainer.done == trainer.last_step:
            self._write(trainer)
        if due or trainer.done == trainer.total_steps:
            self._losses = []
            self._restart_clock()

    def _write(self, trainer: Trainer) -> None:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        line = {
            "epoch": trainer.done / self.steps_per_epoch,
            "loss": sum(self._losses) / len(self._losses) if self._losses else float("nan"),
            "gradient_norm": self._gradient_norm,
            "images_per_second": self._steps * self.images_per_step / seconds,
            "not_finite": trainer.not_finite,
            **asdict(trainer.values),
            **trainer.measurements,
        }
        trainer.measurements = line
        self.folder.record(trainer.done, line)

    def _restart_clock(self) -> None:
        self._steps, self._since = 0, time.perf_counter()

    def state(self) -> dict[str, Any]:
        return {"losses": self._losses}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._losses = list(state["losses"])
