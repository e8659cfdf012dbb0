"""Checks of a configuration that need no data: whether the model can be built and the batch be split."""

import torch

from stop_mim.errors import InputError
from stop_mim.models.encoder import Encoder
from stop_mim.training.acceleration import require_possible
from stop_mim.models.build import build_objective
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks


def check_model(config: TrainConfig, ranks: Ranks | None = None) -> Encoder:
    """Build the model on the meta device, without its memory; a configuration that cannot work raises InputError."""
    with torch.device("meta"):
        objective = build_objective(config)
    if ranks is not None:
        require_possible(config.speed, ranks)
    return objective.encoder


def split_batch(config: TrainConfig, ranks: Ranks) -> tuple[int, int]:
    """Return the images per batch on one device, and the batches per step."""
    total = config.optim.batch_size
    per_device = config.speed.batch_size_per_device or max(1, total // ranks.world_size)
    if total % (per_device * ranks.world_size):
        raise InputError(
            f"optim.batch_size is {total}: it must be a multiple of {per_device * ranks.world_size} "
            f"({per_device} images on each of {ranks.world_size} devices)."
        )
    return per_device, total // (per_device * ranks.world_size)
