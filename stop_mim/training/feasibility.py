"""Whether a configuration can work at all, and as it says: what can be known before the data are read."""

import operator

import torch

from stop_mim.errors import InputError
from stop_mim.models.encoder import Encoder
from stop_mim.training.acceleration import require_possible
from stop_mim.training.build import build_objective
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks

NOISY, MULTIBLOCK, IJEPA = ("stochastic",), ("multiblock",), ("ijepa",)
# What is asked for, the value that asks for nothing, and the choices with which it has an effect.
EFFECTIVE_WITH: dict[str, tuple[object, str, tuple[str, ...]]] = {
    "objective.target_resolution": ("full", "objective.kind", IJEPA),
    "objective.l1_strength": (0.0, "objective.kind", IJEPA),
    "predictor.shared_context": (False, "objective.kind", IJEPA),
    "positions.sigma_start": (None, "positions.kind", NOISY),
    "positions.covariance": ("tied", "positions.kind", NOISY),
    "positions.apply_to": ("masked", "positions.kind", (*NOISY, "jittered")),
    "positions.jitter_learned": (False, "positions.kind", ("jittered",)),
    "masks.target_tokens": (None, "masks.kind", MULTIBLOCK),
    "masks.context_tokens": (None, "masks.kind", MULTIBLOCK),
    "masks.compat": (None, "masks.kind", MULTIBLOCK),
}


def require_effects(config: TrainConfig) -> None:
    """Refuse what is asked for and would be passed over in silence because of another choice."""
    for name, (idle, decides, choices) in EFFECTIVE_WITH.items():
        value, chosen = (operator.attrgetter(path)(config) for path in (name, decides))
        if value != idle and chosen not in choices:
            raise InputError(
                f"{name} is {value} and {decides} {chosen}, with which it has no effect: leave it out, or choose "
                f"{decides} {' or '.join(choices)}."
            )


def check_model(config: TrainConfig, ranks: Ranks | None = None) -> Encoder:
    """Build the model without its memory, so that a configuration that cannot work (on these devices) is refused at once."""
    with torch.device("meta"):
        objective = build_objective(config)
    if ranks is not None:
        require_possible(objective, config.speed, ranks)
    return objective.encoder


def split_batch(config: TrainConfig, ranks: Ranks) -> tuple[int, int]:
    """Images at a time on one device, and batches a step."""
    total = config.optim.batch_size
    per_device = config.speed.batch_size_per_device or max(1, total // ranks.world_size)
    if total % (per_device * ranks.world_size):
        raise InputError(
            f"optim.batch_size is {total}: it must be a multiple of {per_device * ranks.world_size}, the images at a time "
            f"({per_device} on each of {ranks.world_size} devices)."
        )
    return per_device, total // (per_device * ranks.world_size)
