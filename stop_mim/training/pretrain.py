"""Pretraining: from a configuration to an objective, batches, a step, callbacks and the trainer that runs them.

Read this first, then trainer.py (the loop), step.py (one update), models/ijepa.py (the objective) and
positions/stochastic.py (StoP itself).
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stop_mim.constraints import check_effects
from stop_mim.data.bad_images import BadImages
from stop_mim.data.batches import Batch
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.models.build import build_objective
from stop_mim.models.objective import Objective
from stop_mim.seeds import derive_seed
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.callbacks.checkpoint import SaveRun
from stop_mim.training.callbacks.health import WatchHealth
from stop_mim.training.callbacks.metrics import MoveSigma, RecordMetrics
from stop_mim.training.callbacks.probe import RunProbe
from stop_mim.training.callbacks.progress import ProgressDisplay, RecordStatus, ShowProgress
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks, broadcast, process_group, share, wait_for_all
from stop_mim.training.inputs import StepInputs, load_as_before
from stop_mim.training.online_probe import ProbeData, make_probe, open_probe_data
from stop_mim.training.run_folder import RunFolder, default_path
from stop_mim.training.schedules import values_at
from stop_mim.training.step import Batches, TrainingStep, make_optimiser
from stop_mim.training.trainer import Callback, Trainer

CHECKPOINT_VERSION = 2
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
        """Whether all steps are done."""
        return self.step >= self.total_steps


def train(
    config: TrainConfig,
    recipe: str = "custom",
    console: Console | None = None,
    initialise: Callable[[Objective], str] | None = None,
) -> TrainResult:
    """Train a new run in a new directory.

    Args:
        config: the run; see `stop_mim.training.recipes` for named ones.
        recipe: name of the configuration, for the records of the run.
        console: where progress is shown; default: standard error.
        initialise: loads initial weights into the objective, and returns a description of them.
    """
    check_effects(config)
    with process_group(config.speed.device) as ranks:
        folder = RunFolder(Path(broadcast(str(config.out or default_path(recipe)), ranks)))
        folder.require_new()
        if ranks.is_main:
            folder.discard_bad_images()
        wait_for_all(ranks)
        with ProgressDisplay(console, ranks.is_main, folder.log) as display:
            parts = prepare(config, folder, ranks, display)
            weights = None if initialise is None else initialise(parts.objective)
            if ranks.is_main:
                folder.create(replace(config, out=str(folder.path)), recipe, weights)
            wait_for_all(ranks)
            with folder.lock(ranks.is_main):
                if weights is not None:
                    display.say(f"weights    {weights}")
                return run(parts, folder, display)


def resume(
    path: Path | str,
    checkpoint: Path | None = None,
    speed: SpeedConfig | None = None,
    stop_after_steps: int | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Continue a run as if it had not been stopped.

    Args:
        path: the run directory.
        checkpoint: file to continue from; default: the newest one, or the first step if there is none.
        speed: replaces the run's own speed group.
        stop_after_steps: stop (and save) after so many steps of the whole run.
        console: where progress is shown; default: standard error.
    """
    folder = RunFolder(Path(path))
    begun = folder.config()
    config = replace(begun, speed=speed or begun.speed, stop_after_steps=stop_after_steps)
    file = checkpoint or folder.newest_checkpoint()
    saved = None if file is None else read_checkpoint(file)
    if saved is None and (weights := folder.initial_weights()) is not None:
        raise InputError(
            f"{path} was to begin with {weights}, which was never saved: start it again with another --out."
        )
    if saved is not None and saved.state.get("run", {}).get("version") != CHECKPOINT_VERSION:
        raise InputError(
            f"{file} was saved by another version of stop-mim, whose runs cannot be resumed: start a new run."
        )
    with (
        process_group(config.speed.device) as ranks,
        folder.lock(ranks.is_main),
        ProgressDisplay(console, ranks.is_main, folder.log) as display,
    ):
        before = {} if saved is None else saved.state["run"]
        parts = prepare(load_as_before(config, before, ranks.device), folder, ranks, display)
        if saved is not None:
            check_continuation(before, parts, display)
            parts.trainer.restore(saved)
        step = parts.trainer.done
        if stop_after_steps is not None and stop_after_steps < step:
            raise InputError(f"stop_after_steps is {stop_after_steps}, and step {step} is done: give a later step.")
        if ranks.is_main:
            folder.forget_after(step)
            folder.record_environment({"resumed_at_step": step})
        wait_for_all(ranks)
        return run(parts, folder, display)


def prepare(config: TrainConfig, folder: RunFolder, ranks: Ranks, display: ProgressDisplay) -> "Parts":
    """Build everything that a run needs; cheap checks come first, then labels, then images."""
    inputs = StepInputs(config, ranks)
    probe_data = None if config.probe.data is None else open_probe_data(config.probe.data, config.probe.label)
    bad_images = folder.bad_images_file.with_suffix(".txt" if ranks.is_main else f".rank{ranks.rank}.txt")
    images = open_images(config, inputs, bad_images, display)
    parts = assemble(config, inputs, images, display.say, display.warn)
    objective, log, steps_per_epoch = parts.objective, config.log, images.steps_per_epoch
    measuring: list[Callback] = [WatchHealth(objective, log.health_every_steps, display.warn)]
    if probe_data is not None:
        measuring.append(open_probe(parts, probe_data, folder, display))
    parts.trainer.callbacks += [
        *measuring,
        RecordMetrics(folder, log.every_steps, config.optim.batch_size, steps_per_epoch, measuring, log.tensorboard),
        ShowProgress(partial(display.update, "training")),
        RecordStatus(folder),
        SaveRun(folder, config.checkpoint, steps_per_epoch, objective.frozen, parts.identity),
    ]
    return parts


def run(parts: "Parts", folder: RunFolder, display: ProgressDisplay) -> TrainResult:
    """Train to the end of the run, or to `stop_after_steps`."""
    trainer, images, encoder = parts.trainer, parts.images, parts.objective.encoder
    end = parts.config.stop_after_steps
    parameters = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    display.say(f"run        {folder.path}")
    display.say(f"data       {images.description}")
    display.say(f"masks      {parts.inputs.masks}")
    display.say(f"encoder    {parameters:.1f} M parameters, {encoder.grid[0]}x{encoder.grid[1]} patches")
    display.say(f"steps      {trainer.done} of {trainer.total_steps} done, {images.steps_per_epoch} per epoch")
    display.say(f"device     {trainer.ranks.device}")
    trainer.run(end)
    return TrainResult(folder.path, trainer.done, trainer.total_steps, trainer.loss, trainer.interrupted_by)


@dataclass(frozen=True)
class Images:
    """The images of a run."""

    starting_at: Callable[[int], Generator[Batch]]
    """Returns the batches of this process, from the batch of that number on."""
    steps_per_epoch: int
    description: str
    identity: dict[str, Any]
    """Fingerprint and loader; kept in checkpoints."""


@dataclass(frozen=True)
class Parts:
    """What takes the steps of a run; `assemble` puts it together for training and for the benchmark."""

    config: TrainConfig
    inputs: StepInputs
    images: Images
    objective: Objective
    autocast: AbstractContextManager[Any]
    trainer: Trainer

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must agree with; kept in checkpoints."""
        ranks = self.inputs.ranks
        return {
            "version": CHECKPOINT_VERSION,
            **self.images.identity,
            "world_size": ranks.world_size,
            "batch_size_per_device": self.inputs.per_device,
            "device": ranks.device.type,
        }


def assemble(
    config: TrainConfig,
    inputs: StepInputs,
    images: Images,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Parts:
    """Build objective, optimiser, step and trainer; the callbacks that do not change the training are left to the caller."""
    ranks, device = inputs.ranks, inputs.ranks.device
    total_steps = config.optim.epochs * images.steps_per_epoch
    torch.manual_seed(derive_seed(config.seed, "weights"))
    objective = build_objective(config, total_steps).to(device)
    optimiser = make_optimiser(objective, config.optim, device)
    autocast = autocast_for(config.speed.precision, device)
    clip = config.optim.clip_gradient_norm
    step = TrainingStep(share(objective, ranks), objective, optimiser, ranks, autocast, clip)
    # Decided by the length of the whole run, so that a resumed session computes as the first one did.
    fast_step = accelerate(step, config.speed, total_steps, say, warn, inputs.masks.has_fixed_counts)

    def batches(first_step: int) -> Generator[Batches]:
        # Closed at the end, so that the workers of a run that failed end with it.
        with closing(images.starting_at(first_step * inputs.batches_per_step)) as found:
            yield from inputs.with_masks(found, first_step)

    trainer = Trainer(
        step=fast_step,
        batches=batches,
        schedule=lambda step: values_at(step, images.steps_per_epoch, config.optim),
        total_steps=total_steps,
        model=objective,
        optimiser=optimiser,
        callbacks=[MoveSigma(objective)],
        ranks=ranks,
        seed=config.seed,
        warn=warn,
        remedy=REMEDY,
    )
    return Parts(config, inputs, images, objective, autocast, trainer)


def open_images(
    config: TrainConfig, inputs: StepInputs, bad_images_file: Path | None, display: ProgressDisplay
) -> Images:
    """Open the dataset; images that can be kept in memory are decoded now."""
    if not config.data:
        raise InputError("data is not given: add --data with a folder, a parquet file or another name of a dataset.")
    source = open_source(config.data)
    batches = inputs.open_batches(source, BadImages(source.name, len(source), bad_images_file), display)
    identity = {"data": source.fingerprint(), **batches.choices}
    steps_per_epoch = batches.order.batches_per_epoch // inputs.batches_per_step
    return Images(batches.starting_at, steps_per_epoch, f"{config.data}; {batches.description}", identity)


def open_probe(parts: Parts, data: ProbeData, folder: RunFolder, display: ProgressDisplay) -> RunProbe:
    """Decode the labelled images in the main process; the other processes wait for it, or fail with it."""
    config, ranks, encoder = parts.config, parts.inputs.ranks, parts.objective.frozen
    probe, complaint = None, None
    if ranks.is_main:
        progress = partial(display.update, "decoding labelled images")
        try:
            probe = make_probe(config.probe, data, encoder, ranks.device, config.seed, folder.bad_images_file, progress)
        except InputError as error:
            complaint = str(error)
    complaint = broadcast(complaint, ranks)
    if complaint is not None:
        raise InputError(complaint)
    return RunProbe(config.probe, probe, data.fingerprint, encoder, parts.autocast, display)


def check_continuation(before: dict[str, Any], parts: Parts, display: ProgressDisplay) -> None:
    """Refuse other data than those of the checkpoint; warn of what makes random draws differ."""
    now = parts.identity
    if before["data"] != now["data"]:
        raise InputError(f"The data '{parts.config.data}' have changed: restore them, or start a new run.")
    if any(before[name] != now[name] for name in ("world_size", "batch_size_per_device")):
        display.warn(
            f"This run began with {before['world_size']} process(es) of {before['batch_size_per_device']} images and "
            f"continues with {now['world_size']} of {now['batch_size_per_device']}, with other random draws."
        )
    if before["loader"] != now["loader"]:
        display.warn(
            f"The loader was {before['loader']} and is {now['loader']} now: the run continues with other crops."
        )
