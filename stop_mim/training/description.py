"""What is shown of a run before its first step: data, model, schedule, speed, and warnings."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stop_mim.data.bad_images import skipped
from stop_mim.models.objective import TargetObjective
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import OptimConfig
from stop_mim.training.derived import warnings_about
from stop_mim.training.inputs import StepInputs
from stop_mim.training.recipes import RECIPES
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.schedules import ema_start, initial_part
from stop_mim.training.trial import Trial, duration

if TYPE_CHECKING:
    from stop_mim.training.pretrain import Parts

# Of the target encoder, at the end of a run.
MOST_INITIAL_PART = 0.01


def describe_run(
    parts: "Parts", folder: RunFolder, display: ProgressDisplay, recipe: str = "", trial: Trial | None = None
) -> None:
    """Show what is trained, and of a new run the warnings.

    Args:
        parts: of the run.
        folder: the run directory.
        display: where to show it.
        recipe: of a new run, which is compared with it.
        trial: what steps before a new run measured.
    """
    config, trainer, encoder = parts.config, parts.trainer, parts.objective.encoder
    parameters = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    display.say(f"run        {folder.path}")
    display.say(f"data       {config.data}; {parts.images.description}")
    if parts.ignored:
        display.say(f"skipped    {skipped(0, parts.ignored)}")
    display.say(f"masks      {parts.inputs.masks}")
    display.say(f"encoder    {parameters:.1f} M parameters, {encoder.grid[0]}x{encoder.grid[1]} patches")
    display.say(f"schedule   {describe_schedule(config.optim, parts.steps_per_epoch)}")
    display.say(f"batch      {describe_batch(parts.inputs)}")
    display.say(f"device     {trainer.ranks.device}")
    if trial is not None:
        seconds, rate = trainer.total_steps * trial.seconds_per_step, config.optim.batch_size / trial.seconds_per_step
        display.say(
            f"measured   {rate:,.3g} images/s, {trial.memory / 2**30:.1f} GiB; about {duration(seconds)} in all"
        )
    if trainer.done:
        display.say(f"resumed    {trainer.done:,} of {trainer.total_steps:,} steps are done")
    else:
        usual = RECIPES[recipe]().optim if recipe in RECIPES else None
        for text in warnings_about(config.optim, parts.n_images, usual):
            display.warn(text)
        if isinstance(parts.objective, TargetObjective):
            warn_of_initial_part(config.optim, trainer.total_steps, display.warn)


def describe_schedule(optim: OptimConfig, steps_per_epoch: int) -> str:
    """Return length, warm-up and learning rate of a run in words."""
    steps = f"{optim.epochs * steps_per_epoch:,} steps ({optim.epochs:,} epochs of {steps_per_epoch:,})"
    return f"{steps}, warm-up {optim.warmup_epochs:g} epochs, learning rate {optim.lr:g}"


def describe_batch(inputs: StepInputs) -> str:
    """Return how the images of a step are divided."""
    total, processes = inputs.config.optim.batch_size, inputs.ranks.world_size
    on_each = f" on each of {processes} devices" if processes > 1 else ""
    accumulated = f", gradients accumulated over {inputs.batches_per_step}" if inputs.batches_per_step > 1 else ""
    return f"{total:,} images per step, {inputs.per_device:,} at once{on_each}{accumulated}"


def warn_of_initial_part(optim: OptimConfig, total_steps: int, warn: Callable[[str], None]) -> None:
    """Warn if the target encoder, which is saved and evaluated, stays too near to its initial weights."""
    part = initial_part(optim, total_steps)
    if part > MOST_INITIAL_PART:
        warn(
            f"At the end of this run {part:.0%} of the target encoder will be its initial weights, because "
            f"optim.ema_start is {ema_start(optim, total_steps):.4g} and the run has {total_steps:,} steps: train longer, or "
            f"set optim.ema_start to {ema_start(replace(optim, ema_start=None), total_steps):.3g}."
        )
