"""Pretraining: a config becomes an objective, batches, a step and a trainer.

Read this first, then trainer.py (the loop), step.py (one update), models/ijepa.py (the objective), models/predictor.py
(context and masked tokens) and positions/stochastic.py (StoP itself).
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stop_mim.constraints import check_effects
from stop_mim.data.batches import Batches
from stop_mim.errors import InputError
from stop_mim.models.build import build_objective
from stop_mim.models.kernels.fast import is_half
from stop_mim.models.objective import Objective
from stop_mim.seeds import derive_seed, seeded_weights
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.callbacks.checkpoint import SaveRun, SaveShardedRun
from stop_mim.training.callbacks.health import WatchHealth
from stop_mim.training.callbacks.metrics import RecordMetrics
from stop_mim.training.callbacks.probe import RunProbe, open_probe_data
from stop_mim.training.callbacks.progress import ProgressDisplay, RecordStatus, ShowProgress
from stop_mim.training.callbacks.trackers import open_trackers
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.continuation import (
    at_absolute_paths,
    fit_processes,
    load_as_before,
    open_checked_images,
    open_checkpoint,
    with_data_at,
)
from stop_mim.training.description import describe_run
from stop_mim.training.distributed import Ranks, broadcast, distribute, is_sharded, on_main, process_group
from stop_mim.training.inputs import StepInputs, SyntheticImages
from stop_mim.training.run_folder import RunFolder, default_path
from stop_mim.training.schedules import values_at
from stop_mim.training.step import TrainingStep, make_optimiser
from stop_mim.training.trainer import Callback, Trainer
from stop_mim.training.trial import measure_steps, settle, take_trial_steps
from stop_mim.training.watch import watch

REMEDY = "lower optim.lr or set optim.clip_gradient_norm; the last checkpoint is not affected"


@dataclass(frozen=True)
class TrainResult:
    """Where a run is when `train` or `resume` returns."""

    folder: Path
    step: int
    total_steps: int
    loss: float
    interrupted_by: str | None

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps


def train(
    config: TrainConfig,
    recipe: str = "custom",
    console: Console | None = None,
    initialise: Callable[..., str] | None = None,
) -> TrainResult:
    """Train a new run in a new directory.

    Args:
        config: the run; see `stop_mim.training.recipes` for named ones.
        recipe: name of the configuration, for the records of the run.
        console: where progress is shown; default: standard error.
        initialise: called with the objective and a function `warn`; loads initial weights and returns a description of them.
    """
    check_effects(config)
    with process_group(config.speed) as ranks:
        folder = RunFolder(Path(broadcast(str(config.out or default_path(recipe)), ranks)))
        folder.require_new()
        # A run that failed before its directory was created may have left a list of bad images.
        on_main(ranks, folder.discard_bad_images)
        with ProgressDisplay(console, ranks.is_main, folder.log) as display:
            config = at_absolute_paths(replace(config, out=str(folder.path)))
            config = settle(config, ranks, display.say, memory_of_step)
            parts = prepare(config, folder, ranks, display)
            weights = None if initialise is None else initialise(parts.objective, warn=display.warn)
            trial = None
            if config.log.trial_steps and not is_sharded(parts.objective):
                display.say("measuring  some trial steps, which are undone")
                trial = take_trial_steps(parts.trainer, config.log.trial_steps)
            on_main(ranks, lambda: folder.create(config, recipe, weights, parts.inputs.ignored))
            with folder.lock(ranks.is_main):
                describe_run(parts, folder, display, recipe, weights, trial)
                return run(parts, folder, display)


def prepare(
    config: TrainConfig,
    folder: RunFolder,
    ranks: Ranks,
    display: ProgressDisplay,
    saved_run: Mapping[str, Any] | None = None,
) -> "Parts":
    """Open the images, build the trainer and add its callbacks; cheap checks come first.

    `saved_run` identifies the run in the checkpoint that is resumed: its settings, data and number of processes.
    """
    # A message about a stuck process goes to the log of the run, too.
    watch.tell = folder.log
    if saved_run is not None:
        config = load_as_before(config, saved_run, ranks.device)
    inputs = StepInputs(config, ranks)
    trackers = open_trackers(folder, config) if ranks.is_main else []
    probe_data = None if config.probe.data is None else open_probe_data(config.probe.data, config.probe.label)
    images, identity = open_checked_images(inputs, folder, display, saved_run)
    watch.mark("start-up, building the model")
    parts = assemble(inputs, images, display.say, display.warn)
    objective, log, steps_per_epoch = parts.objective, config.log, parts.steps_per_epoch
    measuring: list[Callback] = [WatchHealth(objective, log.health_every_steps, display.warn)]
    if probe_data is not None:
        measuring.append(RunProbe(config, probe_data, objective, parts.autocast, ranks, folder, display))
    save = SaveShardedRun if is_sharded(objective) else SaveRun
    # The order matters: measure, record, track, show, save.
    parts.trainer.callbacks += [
        *measuring,
        RecordMetrics(folder, log.every_steps, config.optim.batch_size, steps_per_epoch, also_at=measuring),
        *trackers,
        ShowProgress(partial(display.update, "training")),
        RecordStatus(folder),
        save(folder, config.checkpoint, steps_per_epoch, objective.frozen, identity),
    ]
    return parts


@dataclass(frozen=True)
class Parts:
    """The objects that make up a run."""

    config: TrainConfig
    inputs: StepInputs
    images: Batches | SyntheticImages
    steps_per_epoch: int
    objective: Objective
    autocast: AbstractContextManager[Any]
    trainer: Trainer


def assemble(
    inputs: StepInputs, images: Batches | SyntheticImages, say: Callable[[str], None], warn: Callable[[str], None]
) -> Parts:
    """Build objective, optimiser, step and trainer, for training and for the benchmark alike."""
    config, ranks, device = inputs.config, inputs.ranks, inputs.ranks.device
    optim, speed = config.optim, config.speed
    steps_per_epoch = images.order.batches_per_epoch // inputs.batches_per_step
    total_steps = optim.epochs * steps_per_epoch
    with seeded_weights(derive_seed(config.seed, "weights")):
        objective = build_objective(config).to(device)
    model = distribute(objective, ranks, speed.sharding, is_half(speed.precision, device), speed.reshard)
    optimiser = make_optimiser(objective, optim, device)
    autocast = autocast_for(speed.precision, device)
    step = TrainingStep(model, objective, optimiser, ranks, autocast, optim.clip_gradient_norm, optim.decay_mask_token)
    trainer = Trainer(
        # The length of the whole run decides what is compiled, so that a resumed session computes as the first one did.
        step=accelerate(step, speed, total_steps, say, warn, inputs.masks.has_fixed_counts),
        batches=partial(inputs.starting_at, images),
        schedule=lambda step: values_at(step, steps_per_epoch, optim),
        total_steps=total_steps,
        model=objective,
        optimiser=optimiser,
        ranks=ranks,
        seed=config.seed,
        warn=warn,
        remedy=REMEDY,
    )
    return Parts(config, inputs, images, steps_per_epoch, objective, autocast, trainer)


def run(parts: Parts, folder: RunFolder, display: ProgressDisplay) -> TrainResult:
    """Train to the end of the run, or to `stop_after_steps`."""
    trainer = parts.trainer
    trainer.run(parts.config.stop_after_steps)
    if skipped := folder.skipped():
        display.say(f"skipped    {skipped}")
    return TrainResult(folder.path, trainer.done, trainer.total_steps, trainer.loss, trainer.interrupted_by)


def resume(
    path: Path | str,
    checkpoint: Path | None = None,
    speed: SpeedConfig | None = None,
    stop_after_steps: int | None = None,
    console: Console | None = None,
    or_older: bool = False,
    data: str | None = None,
) -> TrainResult:
    """Continue a run as if it had not been stopped.

    Args:
        path: the run directory.
        checkpoint: file to continue from; default: the newest one, or the first step if there is none.
        speed: replaces the run's own speed group.
        stop_after_steps: stop (and save) after this step of the whole run.
        console: where progress is shown; default: standard error.
        or_older: where the newest checkpoint is damaged, continue from the newest good one.
        data: where the run's data are now, if they have moved.
    """
    folder = RunFolder(Path(path))
    original = with_data_at(folder.config(), data)
    config = replace(original, speed=speed or original.speed, stop_after_steps=stop_after_steps)
    with (
        process_group(config.speed) as ranks,
        folder.lock(ranks.is_main),
        ProgressDisplay(console, ranks.is_main, folder.log) as display,
    ):
        # Not before the lock: a session that is about to end may still save one.
        saved, damaged = open_checkpoint(folder, checkpoint, or_older)
        step = 0 if saved is None else saved.step
        if stop_after_steps is not None and stop_after_steps < step:
            raise InputError(f"stop_after_steps is {stop_after_steps}, and step {step} is done: give a later step.")
        if data is not None:
            on_main(ranks, folder.discard_bad_images)
        # A number of images at once that is given for this session is not changed.
        if config.speed.batch_size_per_device == original.speed.batch_size_per_device:
            config = fit_processes(config, ranks)
        for error in damaged:
            display.warn(f"{error} Using an older checkpoint (--or-older).")
        parts = prepare(config, folder, ranks, display, None if saved is None else saved.state["run"])
        if saved is not None:
            parts.trainer.restore(saved)
            # Unmap the file: it would keep its disk space after it is deleted.
            saved = None
        on_main(ranks, lambda: folder.resume_at(step, None if data is None else original))
        describe_run(parts, folder, display)
        return run(parts, folder, display)


def memory_of_step(config: TrainConfig, device: torch.device, images: int) -> int:
    """Return the bytes that a plain step of this run needs for a batch of this many images."""
    speed = replace(config.speed, batch_size_per_device=images, compile=False, graph=False)
    config = replace(config, optim=replace(config.optim, batch_size=images), speed=speed)
    inputs = StepInputs(config, Ranks(0, 1, 1, device))
    trainer = assemble(inputs, SyntheticImages(inputs), warnings.warn, warnings.warn).trainer
    return measure_steps(trainer).memory
