"""Checkpoints: written every so many steps and when a session ends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stop_mim.models.encoder import Encoder, save_encoder
from stop_mim.training.checkpoint import checkpoint_path, prune_checkpoints, save_checkpoint
from stop_mim.training.config import CheckpointConfig
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer


class SaveCheckpoint(Callback):
    """Saves the trainer in one file; it must be the last callback, so that it saves the state of all others.

    Args:
        path: the file, replaced at every save.
        every_steps: steps between two saves; the end of a session is always saved.
        run: plain values that identify what is trained; compare them before a checkpoint is restored.
    """

    def __init__(self, path: Path, every_steps: int, run: dict[str, Any]) -> None:
        self.path, self.every_steps, self.run = path, every_steps, run

    def reads(self, step: int) -> bool:
        return step % self.every_steps == 0

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        if trainer.stops or self.reads(trainer.done):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        save_checkpoint(trainer.checkpoint(self.run), self.path)


class SaveRun(SaveCheckpoint):
    """Saves the checkpoints of a run directory, each with the encoder of its step, and removes old ones."""

    def __init__(
        self, folder: RunFolder, config: CheckpointConfig, steps_per_epoch: int, encoder: Encoder, run: dict[str, Any]
    ) -> None:
        super().__init__(folder.checkpoints, config.every_steps, run)
        self.folder, self.encoder, self.keep = folder, encoder, config.keep
        epochs = config.milestone_every_epochs
        self.milestone_steps = None if epochs is None else epochs * steps_per_epoch

    def start(self, trainer: Trainer) -> None:
        """Write the encoder of the step that the run continues from: a killed run may have left an older one.

        Given initial weights are saved before the first step: the run must never be resumed from new ones.
        """
        if trainer.done:
            save_encoder(self.encoder, self.folder.encoder_file)
        elif self.folder.initial_weights() is not None:
            self.save(trainer)

    def reads(self, step: int) -> bool:
        return super().reads(step) or (self.milestone_steps is not None and step % self.milestone_steps == 0)

    def save(self, trainer: Trainer) -> None:
        save_checkpoint(trainer.checkpoint(self.run), checkpoint_path(self.path, trainer.done))
        save_encoder(self.encoder, self.folder.encoder_file)
        prune_checkpoints(self.path, self.keep, self.milestone_steps)
        self.folder.log(f"Saved step {trainer.done}.")
