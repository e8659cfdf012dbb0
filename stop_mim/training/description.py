"""What is shown of a run before its first step: data, model, schedule, speed, and warnings."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stop_mim.models.objective import TargetObjective
from stop_mim.tables import as_rate, duration
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import OptimConfig
from stop_mim.training.recipes import RECIPES
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.schedules import ema_start, initial_part
from stop_mim.training.trial import Trial

if TYPE_CHECKING:
    from stop_mim.training.pretrain import Parts

FEWEST_STEPS = 1_000
"""A run that takes fewer steps learns little."""
MOST_INITIAL_PART = 0.01
"""Of the target encoder, at the end of a run."""


def describe_run(
    parts: "Parts",
    folder: RunFolder,
    display: ProgressDisplay,
    recipe: str = "",
    weights: str | None = None,
    trial: Trial | None = None,
) -> None:
    """Show what is trained; `recipe`, initial `weights` and `trial` belong to a new run, which is also warned of."""
    config, trainer, inputs, encoder = parts.config, parts.trainer, parts.inputs, parts.objective.encoder
    optim, per_epoch, total, ranks = config.optim, parts.steps_per_epoch, trainer.total_steps, trainer.ranks
    parameters = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    on_each = f" on each of {ranks.world_size} devices" if ranks.world_size > 1 else ""
    batches = inputs.batches_per_step
    accumulated = f", gradients accumulated over {batches}" if batches > 1 else ""
    measured = resumed = ""
    if trial is not None:
        rate, seconds = optim.batch_size / trial.seconds_per_step, total * trial.seconds_per_step
        measured = f"{as_rate(rate)} images/s, {trial.memory / 2**30:.1f} GiB; about {duration(seconds)} in all"
    if trainer.done:
        resumed = f"{trainer.done:,} of {total:,} steps are done"
    lines = {
        "weights": weights or "",
        "run": folder.path,
        "data": f"{config.data}; {parts.images.description}",
        "skipped": folder.skipped(),
        "masks": inputs.masks,
        "encoder": f"{parameters:.1f} M parameters, {encoder.grid[0]}x{encoder.grid[1]} patches",
        "schedule": f"{total:,} steps ({optim.epochs:,} epochs of {per_epoch:,}), warm-up {optim.warmup_epochs:g} epochs, "
        f"learning rate {optim.lr:g}",
        "batch": f"{optim.batch_size:,} images per step, {inputs.per_device:,} at once{on_each}{accumulated}",
        "device": ranks.device,
        "measured": measured,
        "resumed": resumed,
    }
    for name, text in lines.items():
        if str(text):
            display.say(f"{name:10} {text}")
    if not trainer.done:
        usual = RECIPES[recipe]().optim if recipe in RECIPES else None
        has_target = isinstance(parts.objective, TargetObjective)
        for text in warnings_about(optim, len(parts.images.order.images), usual, has_target):
            display.warn(text)


def warnings_about(
    optim: OptimConfig, images: int, recipe: OptimConfig | None = None, has_target: bool = True
) -> list[str]:
    """Return warnings about a run that is too short, leaves images out, or has a learning rate for another batch.

    `recipe` are the recipe's own values, if there are any.
    """
    steps_per_epoch = images // optim.batch_size
    left_out, steps = images - steps_per_epoch * optim.batch_size, optim.epochs * steps_per_epoch
    found = []
    if steps < FEWEST_STEPS:
        found.append(
            f"The run has {steps:,} steps, too few to learn much (the demo's very small model takes 2,600): raise "
            "optim.epochs, lower optim.batch_size, or add images."
        )
    if left_out > images / 10:
        found.append(
            f"{left_out:,} of the {images:,} images do not fill a batch of {optim.batch_size:,} and are left out, "
            "different ones in each epoch: lower optim.batch_size."
        )
    if recipe is not None and optim.lr == recipe.lr and optim.batch_size != recipe.batch_size:
        scaled = f"{recipe.lr * math.sqrt(optim.batch_size / recipe.batch_size):.3g}"
        found.append(
            f"optim.batch_size is {optim.batch_size:,}, and optim.lr is the recipe's {recipe.lr:g} for {recipe.batch_size:,} "
            f"images: it is not scaled; with the square root of the batch it would be {scaled} (--optim.lr {scaled})."
        )
    # The target encoder is what is saved and evaluated.
    part = initial_part(optim, steps) if has_target else 0.0
    if part > MOST_INITIAL_PART:
        found.append(
            f"At the end of this run {part:.0%} of the target encoder will be its initial weights, because optim.ema_start is "
            f"{ema_start(optim, steps):.4g} and the run has {steps:,} steps: train longer, or set optim.ema_start to "
            f"{ema_start(replace(optim, ema_start=None), steps):.3g}."
        )
    return found
