"""Settings that follow from others: from the number of images and the device, or from the number of epochs.

The rules are in docs/guides/own-images.md, with their reasons. A value that is given is never changed.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stop_mim.training.config import TrainConfig

FEWEST_A_BATCH, MOST_A_BATCH, BATCHES_AN_EPOCH = 16, 256, 16
ROUND_BATCHES_FROM = 64
LR, LR_BATCH = 5e-4, 256
"""Peak learning rate, and the batch size that it is for."""
WARMUP, START, FINAL = 0.1, 0.1, 0.01
"""Warm-up as a fraction of the epochs; learning rates at the first and last step as fractions of the peak."""
STEPS = {"cuda": 20_000, "cpu": 2_000}
EPOCHS = {"cuda": (100, 800), "cpu": (10, 100)}
COUNTED_IN_EPOCHS = ("warmup_epochs", "hold_after_epoch")


def derive(config: TrainConfig, images: int, device: str, processes: int = 1) -> TrainConfig:
    """Return a config in which the fields of `optim.derive` follow from the number of images and the kind of device."""
    wanted, optim = set(config.optim.derive), config.optim
    batch = batch_for(images, processes) if "batch_size" in wanted else optim.batch_size
    epochs = epochs_for(images // max(1, batch), device) if "epochs" in wanted else optim.epochs
    lr = LR * math.sqrt(batch / LR_BATCH) if "lr" in wanted else optim.lr
    values = {
        "batch_size": batch,
        "epochs": epochs,
        "lr": lr,
        "start_lr": START * lr,
        "final_lr": FINAL * lr,
        "warmup_epochs": WARMUP * epochs,
    }
    chosen: dict[str, Any] = {name: _short(value) for name, value in values.items() if name in wanted}
    return replace(config, optim=replace(optim, **chosen, derive=()))


def batch_for(images: int, processes: int = 1) -> int:
    """Return a sixteenth of the images, from 16 to 256, so that whole batches make up an epoch; few images are one batch."""
    wanted = min(max(images / BATCHES_AN_EPOCH, FEWEST_A_BATCH), MOST_A_BATCH)
    batch = images // max(1, round(images / wanted))
    multiple = processes * (8 if batch >= ROUND_BATCHES_FROM * processes else 1)
    return max(multiple, batch // multiple * multiple)


def epochs_for(steps_per_epoch: int, device: str) -> int:
    """Return the epochs that make 20,000 steps, within 100 to 800; on the CPU 2,000 steps, within 10 to 100."""
    fewest, most = EPOCHS[device]
    return min(max(math.ceil(STEPS[device] / max(1, steps_per_epoch)), fewest), most)


def following(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return the config with the given number of epochs; warm-up and hold keep their fraction of the run.

    `given` has values, or their text, by the path of their field; these fields are no longer derived from the images.
    """
    optim = config.optim
    derived = tuple(name for name in optim.derive if f"optim.{name}" not in given)
    try:
        factor = int(given.get("optim.epochs", optim.epochs)) / optim.epochs
    except (TypeError, ValueError, OverflowError):
        factor = 0.0
    if factor <= 0:
        # A bad value is refused where it is parsed.
        return config
    kept = {name: value for name in COUNTED_IN_EPOCHS if (value := getattr(optim, name)) is not None}
    scaled: dict[str, Any] = {name: _short(factor * value) for name, value in kept.items()} if factor != 1 else {}
    return replace(config, optim=replace(optim, epochs=round(factor * optim.epochs), derive=derived, **scaled))


def _short(value: float) -> float:
    """Return a number with three significant digits, an int as it is."""
    return value if isinstance(value, int) else float(f"{value:.3g}")
