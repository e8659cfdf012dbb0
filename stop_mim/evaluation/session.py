"""What the tasks of an evaluation share: processes, screen, records, and the features of one encoder, computed once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stop_mim.data.image_source import ImageSource
from stop_mim.data.labelled import DecodedSource, LabelledSet
from stop_mim.data.loader import Progress, common_size, resident_budget
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.evaluation.encoders import NamedEncoder
from stop_mim.evaluation.features import (
    Features,
    View,
    centre_view,
    encoder_fingerprint,
    extract_features,
    features_folder,
)
from stop_mim.evaluation.labelled_training import images_at_a_time
from stop_mim.evaluation.linear import Chunks
from stop_mim.evaluation.protocols import LinearProtocol, find_protocol, fitted, guess_protocol
from stop_mim.evaluation.results import Evaluation, today
from stop_mim.evaluation.task_data import TaskData
from stop_mim.training.distributed import Ranks
from stop_mim.training.inputs import workers_for
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.run_folder import environment


@dataclass(frozen=True)
class Session:
    """What is asked for, the processes that do it, and the screen that shows it."""

    config: EvaluateConfig
    ranks: Ranks
    display: ProgressDisplay

    def bar(self, name: str, unit: str = "") -> Progress:
        """A line on the screen that counts some work, with its rate."""
        started: list[tuple[float, int]] = []

        def show(done: int, total: int) -> None:
            now = time.perf_counter()
            if not started:
                started.append((now, done))
            since, first = started[0]
            rate = (done - first) / (now - since) if now > since else 0.0
            self.display.update(name, done, total, f"{rate:,.1f} {unit}/s".replace(" /s", "/s") if rate else "")

        return show

    def record(
        self,
        name: str,
        task: str,
        label: str,
        test_name: str,
        protocol: dict[str, Any],
        metrics: dict[str, float],
        facts: dict[str, Any],
        details: dict[str, Any] | None = None,
    ) -> Evaluation:
        """What was measured, with what it was measured by."""
        around, config = environment(), self.config
        facts |= {"date": today(), "versions": around["packages"], "python": around["python"], "gpu": around["gpu"]}
        facts |= {"device": str(self.ranks.device), "processes": self.ranks.world_size}
        return Evaluation(
            name, task, label, config.data, test_name, protocol, config.seed, metrics, facts, details or {}
        )


class EncoderSession:
    """One encoder in a session: what its weights are known by, and its features, computed once."""

    def __init__(self, session: Session, named: NamedEncoder) -> None:
        self.session, self.name, self.encoder = session, named.name, named.encoder
        self.layers = sorted({min(count, named.encoder.depth) for count in session.config.linear.layers})
        self.fingerprint = encoder_fingerprint(named.encoder)
        self._folders: dict[tuple[int, View], Path] = {}
        self._features: dict[Path, Features] = {}

    def protocol(self, data: TaskData) -> LinearProtocol:
        """The protocol that is asked for, or the data's own, for images of this encoder's size."""
        asked, source = self.session.config.protocol, data.train.source
        if asked != "auto":
            protocol = find_protocol(asked)
        else:
            protocol = find_protocol("clevr-dist") if data.label == "distance" else guess_protocol(source)
        return fitted(protocol, source, self.encoder.image_size)

    def find_folders(self, data: Sequence[TaskData]) -> None:
        """All that is named after the weights, while they are in this machine's memory: from a GPU each is fetched alone."""
        for one in data:
            view = self._view(self.protocol(one))
            for labelled in (one.train, one.test):
                self._folder(labelled.source, view)

    def features(self, labelled: LabelledSet, protocol: LinearProtocol) -> tuple[Features, Int[Tensor, " n"]]:
        """Features and labels of those images that could be read."""
        features = _only(self._source_features(labelled.source, self._view(protocol)), labelled.indices)
        return features, torch.from_numpy(labelled.labels.astype(np.int64))[features.indices]

    def chunks(self, features: Features) -> Chunks:
        """In the device's memory if there is room, else as they lie on disk."""
        ranks = self.session.ranks
        fits = features.size_on_device() <= resident_budget(ranks.device, ranks.processes_on_host)
        return [features.on(ranks.device)] if fits else list(features.chunks)

    def _view(self, protocol: LinearProtocol) -> View:
        return centre_view(protocol.test_view, self.encoder.image_size)

    def _folder(self, source: ImageSource, view: View) -> Path:
        key = id(source), view
        if key not in self._folders:
            self._folders[key] = features_folder(self.encoder, source, view, self.layers[-1], self.session.ranks.device)
        return self._folders[key]

    def _source_features(self, source: ImageSource, view: View) -> Features:
        folder = self._folder(source, view)
        if folder not in self._features:
            session, speed = self.session, self.session.config.speed
            workers, size = workers_for(speed, session.ranks), common_size(source)
            decoding = session.bar(f"decoding {source.name}")
            self._features[folder] = extract_features(
                self.encoder,
                source if size is None else DecodedSource(source, size, workers, decoding),
                view,
                self.layers[-1],
                session.ranks,
                folder,
                images_at_a_time(speed),
                workers,
                session.bar(f"{self.name} features of {source.name}"),
            )
        return self._features[folder]


def _only(features: Features, indices: np.ndarray) -> Features:
    """Those of the images with these numbers; without copying, if they are all."""
    here = torch.isin(features.indices, torch.from_numpy(np.asarray(indices, dtype=np.int64)))
    if here.all():
        return features
    rows: Int[Tensor, " n"] = here.nonzero()[:, 0]
    return Features((features.rows(rows),), features.indices[rows], features.layer_dim)
