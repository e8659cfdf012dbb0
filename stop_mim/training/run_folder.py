"""The folder of a run: what was asked for, where it ran, what was measured, and what was learned."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.tensorboard import SummaryWriter

from stop_mim.errors import InputError
from stop_mim.files import held, write_atomically
from stop_mim.models.encoder import ENCODER_FILE
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import TrainConfig, from_json, to_json

PACKAGES = ("stop-mim", "torch", "torchvision", "timm", "numpy", "safetensors")
LOCK_FILE = ".lock"


class RunFolder:
    """Paths and records of one run; only one process writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.log_file = path / "log.txt"
        self.bad_images_file = path / "bad_images.txt"
        self.encoder_file = path / ENCODER_FILE
        self.checkpoints = path / "checkpoints"
        self.events = path / "tensorboard"
        self._writer: SummaryWriter | None = None

    def require_new(self) -> None:
        """Refuse a folder that holds something already."""
        if self.config_file.exists():
            raise InputError(
                f"{self.path} already holds a run: continue it with 'stop-mim resume {self.path}', or choose another --out."
            )
        # A run that ended before its first step because of bad images leaves the lists of its processes behind.
        others = set(self.path.iterdir()) - set(self._bad_images_files()) if self.path.is_dir() else set()
        if self.path.exists() and (not self.path.is_dir() or others):
            raise InputError(f"{self.path} exists and is not an empty folder: choose another --out.")
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(f"{self.path} cannot be written ({existing} allows no new files): choose another --out.")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What cannot be written, for want of space or of rights, is an InputError; what is in the folder stays good."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            begun = self.config_file.exists()
            remedy = f"mend that, then 'stop-mim resume {self.path}'" if begun else "choose another --out"
            raise InputError(f"{self.path} cannot be written ({reason}): {remedy}.") from error

    @contextmanager
    def held(self, is_main: bool) -> Iterator[None]:
        """Let no other process train in the folder meanwhile; of the run's own ones, the main one sees to it."""
        if not is_main:
            yield
            return
        with ExitStack() as stack:
            with self.writing():
                is_ours = stack.enter_context(held(self.path / LOCK_FILE))
            if not is_ours:
                raise InputError(f"{self.path} is being trained by another process: wait for it, or end it first.")
            yield

    def discard_bad_images(self) -> None:
        """Forget the bad images of a run that never began: the data may have been repaired since."""
        for file in self._bad_images_files():
            file.unlink()

    def _bad_images_files(self) -> list[Path]:
        return list(self.path.glob(f"{self.bad_images_file.stem}*.txt"))

    def create(self, config: TrainConfig, recipe: str, weights: str | None = None) -> None:
        """Begin the records of a new run, and of the weights that it was given, if any."""
        self.require_new()
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            # The configuration comes last: with it there is a run, which must not forget what it began with.
            self.record_environment({"recipe": recipe, **({} if weights is None else {"weights": weights})})
            write_atomically(self.config_file, lambda file: file.write_text(to_json(config)))

    def record_environment(self, facts: dict[str, Any]) -> None:
        """Add what is known of this session of the run."""
        sessions = [*self._sessions(), {**environment(), **facts}]
        with self.writing():
            write_atomically(self.environment_file, lambda file: file.write_text(json.dumps(sessions, indent=2)))

    def _sessions(self) -> list[dict[str, Any]]:
        if not self.environment_file.exists():
            return []
        try:
            return list(json.loads(self.environment_file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{self.environment_file} cannot be read ({error}): restore or delete it.") from error

    def config(self) -> TrainConfig:
        """The configuration of the run in this folder."""
        if not self.config_file.exists():
            raise InputError(f"{self.path} holds no run (no config.json): name the folder of a run.")
        try:
            return from_json(self.config_file.read_text())
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise InputError(f"{self.config_file} cannot be read ({error}): restore it or start a new run.") from error

    def recipe(self) -> str:
        """The name of the recipe that the run began with."""
        return next((session["recipe"] for session in self._sessions() if "recipe" in session), "custom")

    def initial_weights(self) -> str | None:
        """Which weights the run was given to begin with, in words; None if they were new."""
        return next((session["weights"] for session in self._sessions() if "weights" in session), None)

    def newest_checkpoint(self) -> Path | None:
        """The file of the newest checkpoint, if there is one."""
        return next(iter(reversed(checkpoints_in(self.checkpoints).values())), None)

    def forget_after(self, step: int) -> None:
        """Drop what was measured after this step, and set later checkpoints aside: those steps come again."""
        with self.writing():
            if self.metrics_file.exists():
                lines = [line for line in self.metrics_file.read_text().splitlines() if _step_of(line) <= step]
                text = "".join(f"{line}\n" for line in lines)
                write_atomically(self.metrics_file, lambda file: file.write_text(text))
            for later, path in checkpoints_in(self.checkpoints).items():
                if later > step:
                    path.replace(path.with_name(f"{path.name}.superseded"))
            # A process that was killed while it saved leaves half a checkpoint behind.
            for half in self.checkpoints.glob(".step-*"):
                half.unlink()

    def open_events(self, step: int) -> None:
        """Begin to write TensorBoard events, after so many steps."""
        with self.writing():
            self._writer = SummaryWriter(str(self.events), purge_step=step + 1)

    def record(self, step: int, values: dict[str, float]) -> None:
        """Append measurements after so many steps."""
        with self.writing():
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if self._writer is not None:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)

    def log(self, text: str) -> None:
        """Append a line to the log."""
        with self.writing(), self.log_file.open("a") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")

    def close(self) -> None:
        """Finish the TensorBoard events."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self.writing():
                writer.close()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The measurements of a run, oldest first."""
    file = RunFolder(folder).metrics_file
    return [json.loads(line) for line in file.read_text().splitlines() if _step_of(line) >= 0] if file.exists() else []


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    cuda = torch.cuda.is_available()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def default_path(recipe: str) -> Path:
    """A new folder's path, named after the recipe and the time."""
    return Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        # The last line of a run that was killed while it was written.
        return float("nan")
