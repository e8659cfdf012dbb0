"""The run directory: configuration, environment, status, metrics, log, checkpoints and encoder of one run."""

import importlib.metadata
import json
import math
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from stop_mim.data.image_source import skipped
from stop_mim.errors import InputError, printable
from stop_mim.files import (
    append_line,
    locked,
    remove,
    remove_temporaries,
    require_creatable,
    require_regular,
    write_atomically,
)
from stop_mim.models.encoder_file import ENCODER_FILE
from stop_mim.records import MOST, from_plain, read_record
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import TrainConfig, to_json

PACKAGES = ("stop-mim", "torch", "torchvision", "timm", "numpy", "safetensors")
LOCK_FILE = ".lock"
BAD_IMAGES_FILES = re.compile(r"bad_images(\.rank\d+)?(\.probe-(train|test))?\.txt")
# Facts of a session that the code reads; the others are for the user.
SESSION_FACTS: dict[str, Any] = {
    "recipe": str,
    "started": str,
    "weights": str,
    "ignored_files": dict[str, int],
    "packages": dict[str, str | None],
}

RunState = Literal["running", "stopped", "finished", "failed"]


class RunFolder:
    """Paths and records of one run; only one process writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.status_file = path / "status.json"
        self.metrics_file = path / "metrics.jsonl"
        self.log_file = path / "log.txt"
        self.bad_images_file = path / "bad_images.txt"
        self.encoder_file = path / ENCODER_FILE
        self.checkpoints = path / "checkpoints"
        self.events = path / "tensorboard"
        self._early_lines: list[str] = []

    def require_new(self) -> None:
        """Raise InputError unless a new run can be created here."""
        if self.config_file.exists():
            raise InputError(
                f"{self.path} already contains a run: continue it with 'stop-mim resume {self.path}', or choose another --out."
            )
        # A run that failed before its first step because of bad images leaves its lists of them behind.
        others = set(self.path.iterdir()) - set(self._bad_images_files()) if self.path.is_dir() else set()
        if self.path.exists() and (not self.path.is_dir() or others):
            raise InputError(f"{self.path} exists and is not an empty directory: choose another --out.")
        require_creatable(self.path)

    @contextmanager
    def lock(self, is_main: bool) -> Iterator[None]:
        """Keep other runs from training in this directory, and remove partial files that a killed one left behind.

        The main process of a run holds the lock for all.
        """
        if not is_main:
            yield
            return
        with locked(self.path / LOCK_FILE) as is_ours:
            if not is_ours:
                raise InputError(f"{self.path} is being trained by another process: wait for it, or stop it first.")
            written = (self.config_file, self.environment_file, self.status_file, self.metrics_file, self.encoder_file)
            remove_temporaries(self.path, [file.name for file in written])
            remove_temporaries(self.checkpoints, ["step-*"])
            yield

    def discard_bad_images(self) -> None:
        """Delete the lists of bad images, of a run that never began or whose data have moved: they may be repaired since."""
        for file in self._bad_images_files():
            file.unlink()

    def _bad_images_files(self) -> list[Path]:
        return [file for file in self.path.glob("bad_images*") if BAD_IMAGES_FILES.fullmatch(file.name)]

    def create(
        self, config: TrainConfig, recipe: str, weights: str | None = None, ignored: Mapping[str, int] | None = None
    ) -> None:
        """Create the directory of a new run; `weights` describes initial weights, `ignored` counts files by extension."""
        self.require_new()
        self.path.mkdir(parents=True, exist_ok=True)
        # config.json comes last: once it exists the run can be resumed, and must know its initial weights.
        facts = {"recipe": recipe, "weights": weights, "ignored_files": dict(ignored or {}) or None}
        self.record_environment({name: value for name, value in facts.items() if value is not None})
        self.write_config(config)

    def write_config(self, config: TrainConfig) -> None:
        write_atomically(self.config_file, lambda file: file.write_text(to_json(config)))

    def record_environment(self, facts: dict[str, Any]) -> None:
        """Append versions, hardware and these facts, for the session that begins."""
        sessions = [*self.sessions(), {**environment(), **facts}]
        write_atomically(self.environment_file, lambda file: file.write_text(json.dumps(sessions, indent=2)))

    def sessions(self) -> list[dict[str, Any]]:
        """Return versions, hardware and other facts of each session of the run."""
        if not self.environment_file.exists():
            return []
        sessions = read_record(self.environment_file, list[dict[str, Any]], "restore or delete it")
        try:
            for session in sessions:
                for name in session.keys() & SESSION_FACTS.keys():
                    from_plain(SESSION_FACTS[name], session[name], name)
        except InputError as error:
            reason = str(error).rstrip(".")
            raise InputError(f"{self.environment_file} cannot be read ({reason}): restore or delete it.") from error
        return sessions

    def config(self) -> TrainConfig:
        if not self.config_file.exists():
            raise InputError(f"{self.path} contains no run (no config.json): give the directory of a run.")
        return read_record(self.config_file, TrainConfig, "restore it or start a new run")

    def fact(self, name: str) -> Any:
        """Return one of the `SESSION_FACTS`, as the first session that has it recorded it; None if none has."""
        return next((session[name] for session in self.sessions() if name in session), None)

    def recipe(self) -> str:
        return self.fact("recipe") or "custom"

    def skipped(self) -> str:
        """Return what was left out of the data, such as "1 unreadable; ignored: 2 .heic, 1 .txt"; "" if nothing was."""
        unreadable = {line for file in self._bad_images_files() for line in file.read_text().splitlines()}
        return skipped(len(unreadable), self.fact("ignored_files") or {})

    def newest_checkpoint(self) -> Path | None:
        """Return the file of the newest checkpoint, if there is one."""
        return next(iter(reversed(checkpoints_in(self.checkpoints).values())), None)

    def resume_at(self, step: int, config: TrainConfig | None = None) -> None:
        """Record a session that continues after this step; a `config` that is given replaces the run's own.

        Later metrics are removed and later checkpoints set aside: the run takes those steps again.
        """
        if self.metrics_file.exists():
            kept = [line for line, values in _measurements(self.metrics_file) if values["step"] <= step]
            text = "".join(f"{line}\n" for line in kept)
            write_atomically(self.metrics_file, lambda file: file.write_text(text))
        for later, path in checkpoints_in(self.checkpoints).items():
            if later > step:
                aside = path.with_name(f"{path.name}.superseded")
                remove(aside)
                path.replace(aside)
        if config is not None:
            self.write_config(config)
        self.record_environment({"resumed_at_step": step})

    def record(self, step: int, values: dict[str, float]) -> None:
        """Append the measurements of a step to metrics.jsonl."""
        append_line(self.metrics_file, json.dumps({"step": step, **values}))

    def write_status(self, state: RunState, step: int, total_steps: int, message: str = "") -> None:
        """Replace status.json."""
        status = {"state": state, "step": step, "total_steps": total_steps, "message": message, "updated": _now()}
        write_atomically(self.status_file, lambda file: file.write_text(json.dumps(status)))

    def status(self) -> dict[str, Any] | None:
        """Return the contents of status.json: state, step, total_steps, message, updated; None without the file.

        A run that was killed is left in the state "running".
        """
        if not self.status_file.exists():
            return None
        return read_record(self.status_file, dict[str, Any], "delete it; the next session writes it again")

    def log(self, text: str) -> None:
        """Append a line to the log; lines from before the run was created are written with the first one after it."""
        self._early_lines.append(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {printable(text)}")
        if self.config_file.exists():
            append_line(self.log_file, "\n".join(self._early_lines))
            self._early_lines.clear()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl, oldest first; lines without a step, and what is not a number, are left out."""
    return [values for _, values in _measurements(RunFolder(folder).metrics_file)]


def _measurements(file: Path) -> Iterator[tuple[str, dict[str, float]]]:
    require_regular(file)
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            found = json.loads(line)
        # The last line of a run that was killed while it was written.
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and type(found.get("step")) is int and 0 <= found["step"] <= MOST:
            numbers = {name: value for name, value in found.items() if type(value) in (int, float)}
            yield line, {name: value for name, value in numbers.items() if not MOST < abs(value) < math.inf}


def environment() -> dict[str, Any]:
    """Return versions and hardware."""
    return {
        "started": _now(),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def default_path(recipe: str) -> Path:
    """Return the path of a new run directory, named after the recipe and the time."""
    return Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
