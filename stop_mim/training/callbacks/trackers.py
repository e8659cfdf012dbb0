"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. Each gets the values of metrics.jsonl."""

import importlib
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from stop_mim.data.image_source import digest
from stop_mim.errors import InputError, MissingExtra, first_line
from stop_mim.training.config import TrainConfig, flat
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer

RUN_TAG = "stop_mim_run"


class Tracker(Callback):
    """Hands every line of metrics.jsonl to `record`; it comes after `RecordMetrics`, which writes them."""

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        if "epoch" in trainer.measurements:
            self.record(trainer.done, trainer.measurements)

    @abstractmethod
    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step."""


class TensorBoard(Tracker):
    """Events in the directory tensorboard of the run, in a new file for each session.

    Written without the thread of TensorBoard's own writer, which prints a traceback into the run when a disk is full.
    TensorBoard reads files in the order of the numbers in their names: a clock that was set back must not change it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder.events
        self._path = self.folder
        self._records: Any = None

    def start(self, trainer: Trainer) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.name.split(".")[3]) for path in self.folder.glob("events.out.tfevents.[0-9]*.*")]
        number = max([int(time.time()), *(number + 1 for number in numbers)])
        self._path = self.folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(self._path.open("wb", buffering=0))
        self._add(file_version="brain.Event:2")
        # Earlier events of steps that are taken again are superseded.
        self._add(step=trainer.done + 1, session_log={"status": "START"})

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step=step, summary={"value": [{"tag": name, "simple_value": x} for name, x in values.items()]})

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        except OSError as error:
            error.filename = str(self._path)
            raise

    def end(self, trainer: Trainer) -> None:
        if self._records is not None:
            self._records.close()


class RemoteTracker(Tracker):
    """A tracker of another package, which may fail: InputError at the start, a warning later."""

    package: ClassVar[str]

    def __init__(self, folder: RunFolder, config: TrainConfig, project: str) -> None:
        self.folder, self.config, self.project = folder, config, project
        try:
            self.library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise MissingExtra(f"log.{self.package}", self.package, self.package) from error
        self._is_open = False

    def start(self, trainer: Trainer) -> None:
        # Unique, and the same when the run is resumed or moved.
        identity = digest([self.folder.fact("started"), self.folder.config().out])
        try:
            self.open(identity)
        except Exception as error:
            raise InputError(
                f"log.{self.package} is '{self.project}', which cannot be opened ({first_line(error).rstrip('.')}): set "
                f"{self.package} up first, or leave it out."
            ) from error
        self._is_open = True

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        try:
            if self._is_open:
                super().after_step(trainer, batch, outcomes)
        except Exception as error:
            self._is_open = False
            trainer.warn(
                f"{self.package} failed ({first_line(error).rstrip('.')}) and is off for the rest of this session; "
                "metrics.jsonl has all values."
            )

    def end(self, trainer: Trainer) -> None:
        if self._is_open:
            self.close(failed=trainer.error is not None)

    @abstractmethod
    def open(self, identity: str) -> None:
        """Begin the run of that identity, or continue it."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the session."""


class WeightsAndBiases(RemoteTracker):
    """A run of a Weights & Biases project."""

    package = "wandb"

    def open(self, identity: str) -> None:
        path, config = self.folder.path, asdict(self.config)
        self._run = self.library.init(
            project=self.project, name=path.name, id=identity, resume="allow", dir=str(path), config=config
        )
        # Not wandb's own steps, which cannot go back: a run that was killed takes some steps again.
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(RemoteTracker):
    """A run of an MLflow experiment."""

    package = "mlflow"

    def open(self, identity: str) -> None:
        mlflow = self.library
        mlflow.set_experiment(self.project)
        wanted = f"tags.{RUN_TAG} = '{identity}'"
        known = mlflow.search_runs(experiment_names=[self.project], filter_string=wanted, output_format="list")
        if known:
            mlflow.start_run(run_id=known[0].info.run_id)
        else:
            mlflow.start_run(run_name=self.folder.path.name, tags={RUN_TAG: identity})
            mlflow.log_params({name: str(value) for name, value in flat(asdict(self.config))})

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self.library.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.library.end_run("FAILED" if failed else "FINISHED")


def open_trackers(folder: RunFolder, config: TrainConfig) -> list[Tracker]:
    """Return the trackers that the config asks for; raise MissingExtra if a package is not installed."""
    log = config.log
    trackers: list[Tracker] = [TensorBoard(folder)] if log.tensorboard else []
    if log.wandb is not None:
        trackers.append(WeightsAndBiases(folder, config, log.wandb))
    if log.mlflow is not None:
        trackers.append(MLflow(folder, config, log.mlflow))
    return trackers
