"""Schedules as pure functions of the step: learning rate, weight decay, target momentum."""

import math
from dataclasses import dataclass

from stop_mim.training.config import OptimConfig

EMA_START, EMA_STEPS = 0.996, 10


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


def ema_start(optim: OptimConfig, total_steps: int) -> float:
    """Return the target's momentum at the first step: as given, or 0.996, lowered for a run of fewer than 2,500 steps.

    A momentum that rises from 1 - 10 / steps to 1 leaves e⁻⁵, 0.7%, of the initial weights in the target, at any length.
    """
    return optim.ema_start if optim.ema_start is not None else min(EMA_START, max(0.0, 1 - EMA_STEPS / total_steps))


def ema_momentum(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the target's momentum at a step."""
    return linear(step / max(total_steps - 1, 1), ema_start(optim, total_steps), optim.ema_final)


def initial_part(optim: OptimConfig, total_steps: int) -> float:
    """Return the part of the target that its initial weights are after the run: the product of all momenta."""
    part = 1.0
    for step in range(total_steps):
        part *= ema_momentum(step, total_steps, optim)
        if part < 1e-4:
            return 0.0
    return part


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
        ema_momentum=ema_momentum(step, total, optim),
    )
