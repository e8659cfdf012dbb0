"""Tasks: what an encoder is scored on. A task is one class in one file, registered by name; see `Task`.

This module and the tasks of the package import torch inside functions, so that mistyped options are reported at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.options import AugmentConfig
from stop_mim.registry import Registry
from stop_mim.results import Score

if TYPE_CHECKING:
    from stop_mim.data.labelled import LabelledSet
    from stop_mim.data.stored import Progress
    from stop_mim.evaluation.features import LabelledFeatures
    from stop_mim.evaluation.labelled_training import Conditions, LabelledTraining
    from stop_mim.evaluation.protocols import Protocol

# The k of top-k accuracies.
TOP = (1, 5)
TASKS: Registry[type["Task"]] = Registry("task", "stop_mim.evaluation.tasks")


class NotApplicable(InputError):
    """A task does not suit the encoder or the data: --task all leaves it out."""


class Task(ABC):
    """One task with one encoder and one labelling of the data.

    A subclass defines `help`, `run` and, where it has options, `Options`: a dataclass whose fields become --NAME.FIELD.
    `subject` is a `Subject` (or `GivenMasks`), `data` a `TaskData` (or `VideoData`). All instances of an evaluation are
    made and checked before the first one runs.
    """

    help: ClassVar[str]
    """One line for the command line."""
    Options: ClassVar[type | None] = None
    needs: ClassVar[Literal["images", "videos"]] = "images"
    labels: ClassVar[tuple[str, ...]] = ()
    """The labels that the task is about; empty: any."""
    in_all: ClassVar[bool] = True
    """Whether --task all includes it."""
    trains: ClassVar[bool] = False
    """Whether it trains on images; --task all runs these tasks last."""

    @classmethod
    def video_split(cls, config: EvaluateConfig) -> str:
        """Return the split of DAVIS that a task on videos uses."""
        return "val"

    def __init__(self, name: str, config: EvaluateConfig, subject: Any, data: Any, progress: "Progress") -> None:
        self.name, self.config, self.subject, self.data, self.progress = name, config, subject, data, progress
        self.options = self.find_options()
        self.details: dict[str, Any] = {}
        """Results that are not scores; `run` may add some."""

    def find_options(self) -> Any:
        return None if self.Options is None else options_of(self.config, self.name)

    def check(self) -> None:
        """Raise InputError if the task cannot run: NotApplicable if the encoder or the data are the reason, not an option."""
        self.settings()

    def notes(self) -> Iterator[str]:
        """Yield messages for the user, shown before the task runs."""
        yield from ()

    def protocol(self) -> "Protocol":
        """Return the protocol of the data, which defines the views of images."""
        return self.subject.protocol(self.data)

    def training_images(self) -> "LabelledSet":
        """Return the images that a task on images learns from."""
        return self.data.train

    def settings(self) -> dict[str, Any]:
        """Return the protocol's name and all settings that the scores depend on, as plain values."""
        protocol = self.protocol()
        views = {"test_view": protocol.test_view, "interpolation": protocol.interpolation}
        return {"name": protocol.name, **views, **plain(self.options)}

    @abstractmethod
    def run(self) -> Iterator[Score]:
        """Yield the scores; called in all processes, and the scores of the main one count."""

    def finish(self) -> None:
        """Remove what `run` kept for a resumption; called in the main process after the scores are saved."""
        return


class FeatureTask(Task):
    """A task on frozen features: all processes extract them, and the main process runs `scores`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.subject.need_layers(self.layers)

    @property
    def layers(self) -> int:
        """Number of last layers that `scores` needs; default: as many as `linear`, so that tasks share cached features."""
        return max(options_of(self.config, "linear").layers)

    def run(self) -> Iterator[Score]:
        train, test = (
            self.subject.features(part, self.protocol()) for part in (self.training_images(), self.data.test)
        )
        if self.subject.ranks.is_main:
            yield from self.scores(train, test)

    @abstractmethod
    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        """Yield the scores; nothing may be chosen by the test features."""


class TrainingTask(Task):
    """A task that trains on images; a state file in the cache lets it resume where it was interrupted."""

    trains = True

    @abstractmethod
    def training(self) -> "LabelledTraining":
        """Return the training, not yet started."""

    @abstractmethod
    def results(self, training: Any) -> Iterator[Score]:
        """Yield the scores of what was trained."""

    def conditions(self, augment: AugmentConfig) -> "Conditions":
        """Return the conditions of a training with this augmentation."""
        from stop_mim.evaluation.labelled_training import Conditions

        return Conditions(self.protocol(), augment, self.config.seed, self.subject.ranks, self.config.speed)

    @cached_property
    def state_file(self) -> Path:
        """The file in the cache that an interrupted training is resumed from."""
        from stop_mim.data.cache import cache_folder
        from stop_mim.data.image_source import digest

        subject = self.subject
        # All that the result depends on.
        identity = [subject.fingerprint, subject.encoder.image_size, self.name, self.training_images().fingerprint()]
        identity += [self.data.test.fingerprint(), self.config.seed, self.settings()]
        return cache_folder() / "evaluations" / f"{digest(identity)}.safetensors"

    def run(self) -> Iterator[Score]:
        from stop_mim.data.cache import require_writable_cache

        require_writable_cache(self.state_file.parent)
        training = self.training()
        training.train(self.state_file, self.progress)
        yield from self.results(training)
        self.subject.note_unreadable(training.unreadable)

    def finish(self) -> None:
        self.state_file.unlink(missing_ok=True)


def options_of(config: EvaluateConfig, name: str) -> Any:
    """Return the options of a task."""
    return getattr(config, name.replace("-", "_"))


def plain(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as values for JSON; empty for None."""
    values = {} if options is None else asdict(options)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
