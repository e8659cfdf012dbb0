"""What evaluations that train on labelled images share: views, batches, accuracies, and a state to go on from."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.data.augment import Augment, AugmentConfig, normalise
from stop_mim.data.labelled import LabelledBatches, LabelledSet, labelled_views, reading_mode
from stop_mim.errors import InputError
from stop_mim.evaluation.features import TestView, centre_view
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.training.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks, broadcast, reduce_mean, wait_for_all
from stop_mim.training.inputs import workers_for

TrainView = Literal["random_resized_crop", "resize_flip"]

LR_IMAGES = 256
IMAGES_AT_A_TIME = 256
TOP = (1, 5)


@dataclass(frozen=True)
class ImageViews:
    """What is seen of the images to learn from and of those to be scored."""

    train_view: TrainView = "random_resized_crop"
    """random_resized_crop: a random part of the image; resize_flip: the whole image. Both are flipped at random."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a random crop, as a part of the image."""
    flip_probability: float = 0.5
    """Chance that a training image is mirrored left to right."""
    test_view: TestView = "resize_crop"
    """resize_crop: the short side to 8/7 of the size, then the centre, as 256 is to 224; resize: the whole image."""

    def augment(self) -> AugmentConfig:
        """The augmentation of the training images."""
        return AugmentConfig(crop_scale=self.crop_scale, flip_probability=self.flip_probability)


@torch.no_grad()
def accuracies(
    predict: Callable[[Tensor], Tensor],
    heads: int,
    data: LabelledSet,
    encoder: FrozenEncoder,
    view: TestView,
    ranks: Ranks,
    speed: SpeedConfig,
) -> Float[Tensor, "heads top"]:
    """Percent of the images whose class is the first, or among the first five, of each head's logits.

    `predict` gives (heads, batch, classes) for normalised images. Every process scores its part of the images; images
    that cannot be read do not count.
    """
    mine = slice(ranks.rank, None, ranks.world_size)
    labels = torch.from_numpy(data.classes[mine])
    right = torch.zeros(heads, len(TOP), dtype=torch.float64, device=ranks.device)
    count = torch.zeros((), dtype=torch.float64, device=ranks.device)
    views = labelled_views(
        data.source,
        data.indices[mine],
        encoder.image_size,
        centre_view(view, encoder.image_size).resize_to,
        ranks.device,
        images_at_a_time(speed),
        workers_for(speed, ranks),
    )
    with closing(views):
        for positions, pixels in views:
            logits = predict(normalise(pixels, encoder.mean, encoder.std))
            right += _hits(logits, labels[positions].to(ranks.device)).sum(1)
            count += len(positions)
    return (100 * reduce_mean(right, ranks) / reduce_mean(count, ranks)).float()


def _hits(
    logits: Float[Tensor, "heads batch classes"], labels: Int[Tensor, " batch"]
) -> Float[Tensor, "heads batch top"]:
    ranked = logits.topk(min(max(TOP), logits.shape[2]), dim=2).indices == labels[:, None]
    hits = torch.stack([ranked[:, :, :top].any(2) for top in TOP], dim=2)
    # A head whose weights are not finite knows nothing, whatever the order of its scores.
    return (hits & torch.isfinite(logits).all(2, keepdim=True)).double()


def labelled_batches(
    data: LabelledSet, augment: Augment, batch_size: int, seed: int, crop: bool, ranks: Ranks, speed: SpeedConfig
) -> LabelledBatches:
    """This process's part of batches that have `batch_size` images over all processes."""
    if batch_size % ranks.world_size:
        raise InputError(
            f"batch_size is {batch_size}: it must be a multiple of {ranks.world_size}, the number of processes."
        )
    mode = speed.loader
    if mode == "auto":
        mode = broadcast(reading_mode(data, ranks.device, ranks.processes_on_host), ranks)
    return LabelledBatches(
        data,
        augment,
        ranks.device,
        batch_size // ranks.world_size,
        seed,
        ranks.rank,
        ranks.world_size,
        mode,
        workers_for(speed, ranks),
        crop,
    )


def check_sets(train: LabelledSet, test: LabelledSet) -> None:
    """There are classes to tell apart, and the test set has no others."""
    known, asked = np.unique(train.classes), np.unique(test.classes)
    if len(known) < 2:
        raise InputError(
            f"All training images of '{train.source.name}' have class {known[0]}: give two classes or more."
        )
    new = np.setdiff1d(asked, known)
    if len(new):
        raise InputError(
            f"Class {new[0]} of the test set '{test.source.name}' has no image in the training set '{train.source.name}': "
            "leave its images out, or add some to the training set."
        )


def ranks_of(encoder: FrozenEncoder) -> Ranks:
    """This process alone, where the encoder is."""
    return Ranks(0, 1, 1, next(iter(encoder.parameters())).device)


def images_at_a_time(speed: SpeedConfig) -> int:
    """Images in the encoder at a time."""
    return speed.batch_size_per_device or IMAGES_AT_A_TIME


class StateFile:
    """Where an evaluation that trains keeps its last epoch; without a path, nowhere."""

    def __init__(self, path: Path | None, identity: dict[str, Any], ranks: Ranks) -> None:
        # As JSON gives it back, where tuples are lists.
        self.path, self.identity, self.ranks = path, json.loads(json.dumps(identity)), ranks

    def save(self, epochs: int, tensors: dict[str, Tensor], **values: Any) -> None:
        """So many epochs are done; written by the main process alone."""
        if self.path is not None and self.ranks.is_main:
            save_checkpoint(Checkpoint(epochs, tensors, {"identity": self.identity, **values}), self.path)
        wait_for_all(self.ranks)

    def read(self) -> Checkpoint | None:
        """What was saved, if there is something; a damaged file, or one of another evaluation, is refused."""
        if self.path is None or not broadcast(self.path.exists(), self.ranks):
            return None
        remedy = "delete it to begin anew, or name another file"
        try:
            found = read_checkpoint(self.path)
        except InputError as error:
            raise InputError(f"{self.path} holds no state to go on from ({_reason(error)}): {remedy}.") from error
        ours, theirs = _flat(self.identity), _flat(found.state.get("identity", {}))
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise InputError(
                    f"{self.path} is of another evaluation (its {name} is {theirs.get(name)}, not {ours[name]}): {remedy}."
                )
        return found


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    inner = {name: value for part in identity.values() if isinstance(part, dict) for name, value in part.items()}
    return {name: value for name, value in identity.items() if not isinstance(value, dict)} | inner


def _reason(error: InputError) -> str:
    return str(error).rpartition(":")[0] or str(error)
