"""Schedules as pure functions of the step: learning rate, weight decay, target momentum."""

import math
from dataclasses import dataclass

from stop_mim.training.config import OptimConfig


def linear(progress: float, start: float, final: float) -> float:
    """Interpolate linearly from start to final, for progress from 0 to 1."""
    return start + (final - start) * min(max(progress, 0.0), 1.0)


def cosine(progress: float, start: float, final: float) -> float:
    """Interpolate from start to final along half a cosine, for progress from 0 to 1."""
    return final + (start - final) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def warmup_cosine(step: float, warmup: float, total: float, start: float, peak: float, final: float) -> float:
    """Rise linearly from start to peak, then fall along half a cosine to final."""
    if step < warmup:
        return linear(step / warmup, start, peak)
    return cosine((step - warmup) / max(total - warmup, 1), peak, final)


@dataclass(frozen=True)
class ScheduledValues:
    """The values that a step is scheduled with."""

    lr: float
    weight_decay: float
    ema_momentum: float


def values_at(step: int, steps_per_epoch: int, optim: OptimConfig) -> ScheduledValues:
    """Return the scheduled values of a step; the first step is 0."""
    total = optim.epochs * steps_per_epoch
    # The last step, total - 1, is the end of every schedule.
    last = max(total - 1, 1)
    held = step if optim.hold_after_epoch is None else min(step, optim.hold_after_epoch * steps_per_epoch)
    warmup = optim.warmup_epochs * steps_per_epoch
    return ScheduledValues(
        lr=warmup_cosine(held, warmup, last, optim.start_lr, optim.lr, optim.final_lr),
        weight_decay=cosine(held / last, optim.weight_decay, optim.final_weight_decay),
        ema_momentum=linear(step / last, optim.ema_start, optim.ema_final),
    )
