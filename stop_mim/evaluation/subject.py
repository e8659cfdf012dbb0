"""The subject of an evaluation: an encoder with its cached features, or given masks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from stop_mim.data.image_source import ImageSource
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.stored import Progress
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, evaluate_config
from stop_mim.evaluation.data import TaskData
from stop_mim.evaluation.features import (
    Features,
    LabelledFeatures,
    extract_features,
    features_folder,
)
from stop_mim.evaluation.protocols import Protocol, choose_protocol
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.exchange.loading import load_encoder, run_of
from stop_mim.files import user_path
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.models.fingerprint import encoder_fingerprint
from stop_mim.results import UNTRAINED
from stop_mim.training.distributed import Ranks, any_rank

CPU = torch.device("cpu")
MASKS = "masks:"
# For at most this fraction of a source, features of the rest are not extracted.
FEW_IMAGES = 0.5


@dataclass(frozen=True)
class GivenMasks:
    """Predicted masks of videos, with the part of the interface of `Subject` that tasks on videos use."""

    name: str
    folder: Path
    ranks: Ranks
    run: None = None
    encoder: None = None

    def facts(self) -> dict[str, Any]:
        """Return what a result records of them."""
        return {}


class Subject:
    """One encoder, with its protocol for each dataset and its features, which are extracted once.

    Args:
        name: what the encoder is called on the command line.
        encoder: its images are of `encoder.image_size`.
        run: the run directory that it comes from, if any.
        bar: returns a progress bar for a description; not given: nothing is shown.
    """

    def __init__(
        self,
        name: str,
        encoder: FrozenEncoder,
        run: Path | None,
        config: EvaluateConfig,
        ranks: Ranks,
        bar: Callable[[str], Progress] = lambda name: lambda done, total: None,
    ) -> None:
        self.name, self.encoder, self.run = name, encoder.eval(), run
        self.config, self.ranks, self.bar = config, ranks, bar
        self.layers = 1
        """Number of last layers whose features are extracted."""
        # On the CPU: from a GPU every tensor would be copied on its own.
        self.fingerprint = encoder_fingerprint(encoder)
        self.place: str | None = None
        """Name of the encoder's folder for files if several encoders are evaluated."""
        self.unreadable: dict[ImageSource, set[int]] = {}
        """Images that could not be read and are left out, by their source; see `note_unreadable`."""
        self._features: dict[tuple[int, int | None, str, int], Features] = {}
        self._protocols: dict[tuple[int, str], Protocol] = {}

    def facts(self) -> dict[str, Any]:
        """Return what a result records of the encoder."""
        facts: dict[str, Any] = {
            "encoder_fingerprint": self.fingerprint,
            "image_size": list(self.encoder.image_size),
            "pool": self.encoder.pool,
        }
        if self.encoder.guessed_heads:
            facts["guessed_heads"] = self.encoder.heads
        if self.unreadable:
            # Training and test images may have the same name.
            facts["unreadable_images"] = unreadable = dict.fromkeys((source.name for source in self.unreadable), 0)
            for source, images in self.unreadable.items():
                unreadable[source.name] += len(images)
        return facts

    def notes(self) -> Iterator[str]:
        """Yield messages about the defaults that were chosen for the encoder."""
        encoder = self.encoder
        if encoder.guessed_heads:
            assumed = f"{encoder.heads} are assumed, as usual for a width of {encoder.dim}"
            yield f"'{self.name}' does not store its number of heads: {assumed}."
        if encoder.pool == "cls" and self.config.pool == "auto":
            yield f"'{self.name}' has a class token, which is probed; --pool mean probes the mean of the patches."

    def note_unreadable(self, found: Mapping[ImageSource, Iterable[int]]) -> None:
        """Record images that could not be read, by their source, for `facts`."""
        for source, images in found.items():
            if images := {*images}:
                self.unreadable.setdefault(source, set()).update(images)

    def need_layers(self, layers: int) -> None:
        """Extract features of at least this many last layers, or of all."""
        self.layers = max(self.layers, min(layers, self.encoder.depth))

    def protocol(self, data: TaskData) -> Protocol:
        """Return the protocol of the data, or the one that the user chose."""
        source = data.train.source
        key = id(source), data.label
        if key not in self._protocols:
            self._protocols[key] = choose_protocol(self.config.protocol, source, data.label, self.encoder.image_size)
        return self._protocols[key]

    def features(self, labelled: LabelledSet, protocol: Protocol) -> LabelledFeatures:
        """Return features and classes of the readable images of a part of the data."""
        source, view = labelled.source, protocol.test_view_of(self.encoder)
        key = id(source), view.resize_to, view.interpolation, self.layers
        known = key in self._features or any_rank(features_folder(self, source, view).exists(), self.ranks)
        if not known and len(labelled) <= FEW_IMAGES * len(source):
            features = extract_features(self, source, view, np.sort(labelled.indices).astype(np.int64))
        else:
            # Other tasks probably need other parts of the source.
            if key not in self._features:
                self._features[key] = extract_features(self, source, view)
            features = self._features[key].of_images(labelled.indices)
        self.note_unreadable({source: np.setdiff1d(labelled.indices, features.indices).tolist()})
        return LabelledFeatures(features, torch.from_numpy(labelled.labels.astype(np.int64))[features.indices])


def open_subject(
    name: str, config: EvaluateConfig, ranks: Ranks, bar: Callable[[str], Progress]
) -> Subject | GivenMasks:
    """Return the masks or the encoder of a name, the latter with the pooling and image size of the config."""
    if name.startswith(MASKS):
        return GivenMasks(name, user_path(name.removeprefix(MASKS)), ranks)
    encoder = load_encoder(name)
    if config.pool not in ("auto", *encoder.pools):
        raise InputError(f"pool is {config.pool}: '{name}' has no class token; choose mean or auto.")
    encoder.pool = encoder.pools[0] if config.pool == "auto" else config.pool
    if (size := config.image_size) is not None:
        height, width = encoder.patch_size
        if size % height or size % width:
            raise InputError(
                f"image_size is {size}: '{name}' has patches of {height}x{width} pixels; give a multiple of them, such as "
                f"{max(height, round(size / height) * height)}."
            )
        encoder.image_size = (size, size)
    # An untrained network belongs to the run of the trained one.
    return Subject(name, encoder, run_of(name.removeprefix(UNTRAINED)), config, ranks, bar)


def feature_task(name: str, classes: int, device: torch.device = CPU, seed: int = 0, **options: Any) -> FeatureTask:
    """Return a task whose `scores` takes features that were computed elsewhere: `LabelledFeatures.in_memory`.

    Args:
        name: linear, knn or low-shot.
        options: those of the task.
    """
    kind = TASKS[name]
    assert issubclass(kind, FeatureTask)
    assert kind.Options is not None
    config = evaluate_config()(seed=seed, **{name.replace("-", "_"): kind.Options(**options)})
    subject = SimpleNamespace(ranks=Ranks(0, 1, 1, device), need_layers=lambda layers: None)
    return kind(name, config, subject, SimpleNamespace(classes=classes), lambda done, total: None)
