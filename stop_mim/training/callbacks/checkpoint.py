"""Callbacks that write checkpoints: every few steps and when a session ends; of sharded models, in the background."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stop_mim.errors import ProcessLost
from stop_mim.models.build import build_encoder
from stop_mim.models.encoder import Encoder
from stop_mim.models.encoder_file import save_encoder
from stop_mim.training.checkpoint import (
    SUFFIX,
    begin_save,
    checkpoint_path,
    finish_save,
    prune_checkpoints,
    save_checkpoint,
    wait_for_shards,
)
from stop_mim.training.config import CheckpointConfig
from stop_mim.training.distributed import wait_for_all, whole_tensor
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

    def needs_outcomes(self, step: int) -> bool:
        return step % self.every_steps == 0

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        if trainer.stops or self.needs_outcomes(trainer.done):
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
            self.save_encoder(trainer)
        elif self.folder.fact("weights") is not None:
            self.save(trainer)

    def needs_outcomes(self, step: int) -> bool:
        return super().needs_outcomes(step) or (self.milestone_steps is not None and step % self.milestone_steps == 0)

    def save(self, trainer: Trainer) -> None:
        save_checkpoint(trainer.checkpoint(self.run), checkpoint_path(self.path, trainer.done))
        self.save_encoder(trainer)
        self.clean_up(trainer.done)

    def save_encoder(self, trainer: Trainer) -> None:
        save_encoder(self.encoder, self.folder.encoder_file)

    def clean_up(self, step: int) -> None:
        """Remove old checkpoints after one was saved."""
        prune_checkpoints(self.path, self.keep, self.milestone_steps)
        self.folder.log(f"Saved step {step}.")


class SaveShardedRun(SaveRun):
    """Saves the shards of all processes in the background, while the training continues.

    A checkpoint gets its name when all of it is on the disk. The next save, and the end of the session, wait for it.
    """

    on_every_rank = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._background, self._pending = ThreadPoolExecutor(1, "checkpoint"), Future[Any]()
        self._pending.set_result(None)

    def start(self, trainer: Trainer) -> None:
        # The processes wait for one another here while the training uses the other group.
        self._group = dist.new_group(backend="gloo")
        super().start(trainer)

    def save(self, trainer: Trainer) -> None:
        self._pending.result()
        checkpoint, path = trainer.checkpoint(self.run), checkpoint_path(self.path, trainer.done, SUFFIX)
        # Named as temporary files are, so that what a killed run leaves behind is removed.
        unfinished = path.with_name(f".{path.name}.unsaved_")
        if trainer.ranks.is_main:
            unfinished.mkdir(parents=True, exist_ok=True)
        wait_for_all(trainer.ranks)
        writing = self._pending = begin_save(checkpoint.tensors, unfinished, self._group)
        encoder = self._whole_encoder()

        def publish() -> None:
            """Wait until all processes have written; the first one then makes the checkpoint and its encoder visible."""
            wait_for_shards(writing, path)
            if trainer.ranks.is_main:
                finish_save(unfinished, path, checkpoint.step, checkpoint.state)
                self._write_encoder(encoder)
                self.clean_up(checkpoint.step)

        self._pending = self._background.submit(publish)

    def save_encoder(self, trainer: Trainer) -> None:
        encoder = self._whole_encoder()
        if trainer.ranks.is_main:
            self._write_encoder(encoder)

    def _whole_encoder(self) -> dict[str, Tensor]:
        """Gather the encoder, tensor by tensor; all processes must ask for it."""
        # Copied, because training continues while they are written.
        tensors = self.encoder.state_dict().items()
        return {name: whole_tensor(tensor).detach().to("cpu", copy=True) for name, tensor in tensors}

    def _write_encoder(self, tensors: dict[str, Tensor]) -> None:
        with torch.device("meta"):
            encoder = build_encoder(self.folder.config().encoder)
        encoder.load_state_dict(tensors, assign=True)
        save_encoder(encoder, self.folder.encoder_file)

    def end(self, trainer: Trainer) -> None:
        if isinstance(trainer.error, ProcessLost):
            # What is under way waits for the process that has ended.
            self._background.shutdown(wait=False)
            return
        try:
            self._pending.result()
        except Exception:
            # An error that ended the training says more.
            if trainer.error is None:
                raise
        finally:
            self._background.shutdown()
