"""Pretraining: from a configuration to an objective, batches, a step, callbacks and the trainer that runs them.

Read this first, then trainer.py (the loop), step.py (one update), models/ijepa.py (the objective) and
positions/stochastic.py (StoP itself).
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
from stop_mim.data.bad_images import skipped
from stop_mim.data.batches import Batches
from stop_mim.data.sources import absolute_name, is_dataset
from stop_mim.errors import InputError
from stop_mim.models.build import build_objective
from stop_mim.models.kernels.fast import is_half
from stop_mim.models.objective import Objective, TargetObjective
from stop_mim.seeds import derive_seed
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.callbacks.checkpoint import SaveRun, SaveShardedRun
from stop_mim.training.callbacks.health import WatchHealth
from stop_mim.training.callbacks.metrics import MoveSigma, RecordMetrics
from stop_mim.training.callbacks.probe import ProbeData, RunProbe, make_probe, open_probe_data
from stop_mim.training.callbacks.progress import ProgressDisplay, RecordStatus, ShowProgress
from stop_mim.training.callbacks.trackers import open_trackers
from stop_mim.training.checkpoint import Checkpoint, NewerCheckpoint, checkpoints_in, read_checkpoint
from stop_mim.training.config import OptimConfig, SpeedConfig, TrainConfig
from stop_mim.training.derived import derive, warnings_about
from stop_mim.training.distributed import Ranks, broadcast, is_sharded, process_group, require_same, share, wait_for_all
from stop_mim.training.inputs import ImageBatches, StepInputs, SyntheticImages, open_data, split_batch
from stop_mim.training.recipes import RECIPES
from stop_mim.training.run_folder import RunFolder, default_path
from stop_mim.training.schedules import ema_start, initial_part, values_at
from stop_mim.training.step import TrainingStep, make_optimiser
from stop_mim.training.trainer import Callback, Trainer
from stop_mim.training.trial import (
    PATCHES_AT_ONCE_ON_CPU,
    STEP_PART_OF_GPU,
    Trial,
    duration,
    forget_peak,
    images_at_once,
    largest_divisor,
    step_memory,
    take_trial_steps,
)
from stop_mim.training.watch import Watch

# Of the target encoder, at the end of a run.
MOST_INITIAL_PART = 0.01
CHECKPOINT_VERSION = 3
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
    with process_group(config.speed.device, config.speed.sharding != "none") as ranks:
        folder = RunFolder(Path(broadcast(str(config.out or default_path(recipe)), ranks)))
        folder.require_new()
        if ranks.is_main:
            folder.discard_bad_images()
        wait_for_all(ranks)
        with ProgressDisplay(console, ranks.is_main, folder.log) as display:
            config = settle(config, ranks, display)
            parts = prepare(config, folder, ranks, display)
            weights = None if initialise is None else initialise(parts.objective, warn=display.warn)
            trial = None
            if config.log.trial_steps and not is_sharded(parts.objective):
                display.say("measuring  some trial steps, which are undone")
                trial = take_trial_steps(parts.trainer, config.log.trial_steps)
            if ranks.is_main:
                kept = replace(with_absolute_paths(config), out=str(folder.path))
                folder.create(kept, recipe, weights, parts.ignored)
            wait_for_all(ranks)
            with folder.lock(ranks.is_main):
                if weights is not None:
                    display.say(f"weights    {weights}")
                return run(parts, folder, display, recipe, trial)


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
        stop_after_steps: stop (and save) after so many steps of the whole run.
        console: where progress is shown; default: standard error.
        or_older: where the newest checkpoint is damaged, continue from the newest good one.
        data: where the run's data are now, if they have moved.
    """
    folder = RunFolder(Path(path))
    begun = folder.config()
    if data is not None:
        begun = replace(begun, data=absolute_name(data))
    elif not is_dataset(begun.data):
        raise InputError(f"The data of this run, '{begun.data}', are not there: give their new place with --data.")
    config = replace(begun, speed=speed or begun.speed, stop_after_steps=stop_after_steps)
    saved, damaged = open_checkpoint(folder, checkpoint, or_older)
    if saved is None and (weights := folder.initial_weights()) is not None:
        raise InputError(
            f"{path} was to begin with {weights}, which was never saved: start it again with another --out."
        )
    with (
        process_group(config.speed.device, config.speed.sharding != "none") as ranks,
        folder.lock(ranks.is_main),
        ProgressDisplay(console, ranks.is_main, folder.log) as display,
    ):
        for error in damaged:
            display.warn(f"{error} An older checkpoint is taken instead, as --or-older asks for.")
        parts = prepare(config, folder, ranks, display, None if saved is None else saved.state["run"])
        if saved is not None:
            parts.trainer.restore(saved)
            # Its tensors are mapped: they would keep the file's space when it is replaced by newer ones.
            saved = None
        step = parts.trainer.done
        if stop_after_steps is not None and stop_after_steps < step:
            raise InputError(f"stop_after_steps is {stop_after_steps}, and step {step} is done: give a later step.")
        if ranks.is_main:
            folder.forget_after(step)
            if data is not None:
                folder.write_config(begun)
            folder.record_environment({"resumed_at_step": step})
        wait_for_all(ranks)
        return run(parts, folder, display)


def open_checkpoint(
    folder: RunFolder, given: Path | None, or_older: bool
) -> tuple[Checkpoint | None, list[InputError]]:
    """Return the checkpoint to continue from, None for a run without any, and the errors of damaged newer ones.

    A damaged checkpoint is an InputError that names the newest good one before it; with `or_older` that one is taken.
    """
    files = [given] if given is not None else [*reversed(checkpoints_in(folder.checkpoints).values())]
    damaged: list[InputError] = []
    for file in files:
        try:
            saved = read_checkpoint(file)
        except NewerCheckpoint:
            raise
        except InputError as error:
            damaged.append(error)
            continue
        if damaged and not or_older:
            raise InputError(f"{damaged[0]} The checkpoint of step {saved.step} is good: --or-older takes it.")
        check_version(saved, file)
        return saved, damaged
    if damaged:
        raise damaged[0]
    return None, []


def check_version(saved: Checkpoint, file: Path) -> None:
    """Refuse a checkpoint of another version, whose runs continue with other random draws."""
    version = saved.state.get("run", {}).get("version")
    if isinstance(version, int) and version > CHECKPOINT_VERSION:
        raise NewerCheckpoint(file)
    if version != CHECKPOINT_VERSION:
        raise InputError(
            f"{file} was saved by another version of stop-mim, whose runs cannot be resumed: start a new run."
        )


def settle(config: TrainConfig, ranks: Ranks, display: ProgressDisplay) -> TrainConfig:
    """Decide what the config leaves open; config.json keeps it, so that a resumed run is the same.

    These are the fields of `optim.derive`, and the images that a device sees at once.
    """
    if config.optim.derive:
        images = len(open_data(config))
        config = derive(config, images, ranks.device.type, ranks.world_size)
    # The memory of sharded weights depends on all processes together.
    if config.speed.batch_size_per_device is not None or config.speed.sharding != "none":
        return config
    per_step, _ = split_batch(config, ranks)
    if ranks.device.type == "cpu":
        height, width = (side // config.encoder.patch_size for side in config.encoder.image_size)
        at_once = largest_divisor(per_step, PATCHES_AT_ONCE_ON_CPU / max(1, height * width))
    else:
        free = torch.cuda.mem_get_info(ranks.device)[0]
        display.say(f"measuring  how many images fit into {free / 2**30:.1f} GiB of free GPU memory at once")
        memory_of = partial(memory_of_step, config, ranks.device)
        at_once = broadcast(images_at_once(per_step, memory_of, STEP_PART_OF_GPU * free), ranks)
        forget_peak(ranks.device)
    return replace(config, speed=replace(config.speed, batch_size_per_device=at_once))


def memory_of_step(config: TrainConfig, device: torch.device, images: int) -> int:
    """Return the bytes that a plain step of this run needs for so many images at once."""
    speed = replace(config.speed, batch_size_per_device=images, compile=False, graph=False)
    config = replace(config, optim=replace(config.optim, batch_size=images), speed=speed)
    inputs = StepInputs(config, Ranks(0, 1, 1, device))
    warn = warnings.warn
    return step_memory(assemble(config, inputs, SyntheticImages(inputs), warn, warn).trainer)


def prepare(
    config: TrainConfig,
    folder: RunFolder,
    ranks: Ranks,
    display: ProgressDisplay,
    before: Mapping[str, Any] | None = None,
) -> "Parts":
    """Build everything that a run needs; cheap checks come first, then labels, then images.

    `before` is the identity of the run in the checkpoint that it continues from, see `identity_of`.
    """
    if before is not None:
        config = load_as_before(config, before, ranks.device)
    inputs = StepInputs(config, ranks)
    trackers = open_trackers(folder, config) if ranks.is_main else []
    probe_data = None if config.probe.data is None else open_probe_data(config.probe.data, config.probe.label)
    bad_images = folder.bad_images_file.with_suffix(".txt" if ranks.is_main else f".rank{ranks.rank}.txt")
    images = inputs.open_images(bad_images, partial(display.update, "decoding images"), display.say)
    identity = identity_of(inputs, images)
    # Local copies have other times, and the same contents.
    require_same(f"The data '{config.data}'", identity["contents"] or identity["data"], ranks)
    if before is not None:
        check_continuation(before, identity, config.data, display)
    parts = assemble(config, inputs, images, display.say, display.warn)
    parts.trainer.watch.tell = folder.log
    objective, log, steps_per_epoch = parts.objective, config.log, parts.steps_per_epoch
    measuring: list[Callback] = [WatchHealth(objective, log.health_every_steps, display.warn)]
    if probe_data is not None:
        measuring.append(open_probe(parts, probe_data, folder, display))
    kind = SaveShardedRun if is_sharded(objective) else SaveRun
    saving = kind(folder, config.checkpoint, steps_per_epoch, objective.frozen, identity)
    parts.trainer.callbacks += [
        *measuring,
        RecordMetrics(folder, log.every_steps, config.optim.batch_size, steps_per_epoch, measuring),
        *trackers,
        ShowProgress(partial(display.update, "training")),
        RecordStatus(folder),
        saving,
    ]
    return parts


def run(
    parts: "Parts", folder: RunFolder, display: ProgressDisplay, recipe: str = "", trial: Trial | None = None
) -> TrainResult:
    """Train to the end of the run, or to `stop_after_steps`.

    Args:
        parts: from `prepare`.
        folder: the run directory.
        display: shows what is trained, and the progress.
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
    trainer.run(config.stop_after_steps)
    if left_out := folder.skipped():
        display.say(f"skipped    {left_out}")
    return TrainResult(folder.path, trainer.done, trainer.total_steps, trainer.loss, trainer.interrupted_by)


def warn_of_initial_part(optim: OptimConfig, total_steps: int, warn: Callable[[str], None]) -> None:
    """Warn if the target encoder, which is saved and evaluated, stays too near to its initial weights."""
    part = initial_part(optim, total_steps)
    if part > MOST_INITIAL_PART:
        warn(
            f"At the end of this run {part:.0%} of the target encoder will be its initial weights, because "
            f"optim.ema_start is {ema_start(optim, total_steps):.4g} and the run has {total_steps:,} steps: train longer, or "
            f"set optim.ema_start to {ema_start(replace(optim, ema_start=None), total_steps):.3g}."
        )


@dataclass(frozen=True)
class Parts:
    """What takes the steps of a run; `assemble` puts it together for training and for the benchmark."""

    config: TrainConfig
    inputs: StepInputs
    images: ImageBatches
    steps_per_epoch: int
    objective: Objective
    autocast: AbstractContextManager[Any]
    trainer: Trainer

    @property
    def n_images(self) -> int:
        """Return the number of images of the dataset."""
        return len(self.images.order.images)

    @property
    def ignored(self) -> Mapping[str, int]:
        """Return how many files beside the images are none, by extension."""
        return self.images.source.ignored if isinstance(self.images, Batches) else {}


def assemble(
    config: TrainConfig,
    inputs: StepInputs,
    images: ImageBatches,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Parts:
    """Build objective, optimiser, step and trainer; the callbacks that do not change the training are left to the caller."""
    ranks, device, optim = inputs.ranks, inputs.ranks.device, config.optim
    steps_per_epoch = images.order.batches_per_epoch // inputs.batches_per_step
    total_steps = optim.epochs * steps_per_epoch
    torch.manual_seed(derive_seed(config.seed, "weights"))
    objective = build_objective(config, total_steps).to(device)
    speed = config.speed
    model = share(objective, ranks, speed.sharding, is_half(speed.precision, device), speed.reshard)
    optimiser = make_optimiser(objective, optim, device)
    autocast = autocast_for(speed.precision, device)
    step = TrainingStep(
        model,
        objective,
        optimiser,
        ranks,
        autocast,
        optim.clip_gradient_norm,
        optim.decay_mask_token,
    )
    trainer = Trainer(
        # Decided by the length of the whole run, so that a resumed session computes as the first one did.
        step=accelerate(step, speed, total_steps, say, warn, inputs.masks.has_fixed_counts),
        batches=partial(inputs.starting_at, images),
        schedule=lambda step: values_at(step, steps_per_epoch, optim),
        total_steps=total_steps,
        model=objective,
        optimiser=optimiser,
        callbacks=[MoveSigma(objective)],
        ranks=ranks,
        seed=config.seed,
        warn=warn,
        remedy=REMEDY,
        watch=Watch(ranks, 60 * speed.timeout_minutes),
    )
    return Parts(config, inputs, images, steps_per_epoch, objective, autocast, trainer)


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


def open_probe(parts: Parts, data: ProbeData, folder: RunFolder, display: ProgressDisplay) -> RunProbe:
    """Decode the labelled images in the main process; the other processes wait for it, or fail with it."""
    config, ranks, probe, complaint = parts.config, parts.inputs.ranks, None, None
    if ranks.is_main:
        try:
            probe = make_probe(
                config.probe,
                data,
                parts.objective.frozen,
                parts.autocast,
                ranks.device,
                config.seed,
                folder.bad_images_file,
                partial(display.update, "decoding labelled images"),
            )
        except InputError as error:
            complaint = str(error)
    complaint = broadcast(complaint, ranks)
    if complaint is not None:
        raise InputError(complaint)
    return RunProbe(config.probe, probe, data.fingerprint, display, parts.objective)


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the config with datasets that can be found from any directory."""
    probe = config.probe if config.probe.data is None else replace(config.probe, data=absolute_name(config.probe.data))
    return replace(config, data=absolute_name(config.data), probe=probe)


def identity_of(inputs: StepInputs, images: Batches) -> dict[str, Any]:
    """Return what a resumed run is compared with; kept in checkpoints."""
    return {
        "version": CHECKPOINT_VERSION,
        "data": images.source.fingerprint(),
        "contents": images.source.contents(),
        **images.choices,
        "device": inputs.ranks.device.type,
        "threads": torch.get_num_threads(),
        # Such noise is relative to the other images on the device.
        "batch_size_per_device": inputs.per_device if inputs.config.positions.conditioned else None,
    }


def load_as_before(config: TrainConfig, before: Mapping[str, Any], device: torch.device) -> TrainConfig:
    """Return a config that decodes images as a checkpoint's run did: pixels depend on it by a decoder's rounding."""
    if before["device"] != device.type:
        return config
    left_open = [name for name in ("loader", "decode") if getattr(config.speed, name) == "auto"]
    return replace(config, speed=replace(config.speed, **{name: before[name] for name in left_open}))


def check_continuation(before: Mapping[str, Any], now: Mapping[str, Any], data: str, display: ProgressDisplay) -> None:
    """Refuse other data than those of the checkpoint; warn of what makes random draws differ."""
    # A copy of the data has other times. Checkpoints of earlier versions have no contents.
    if before["data"] != now["data"] and before.get("contents") != now["contents"]:
        raise InputError(f"The data '{data}' have changed: restore them, or start a new run.")
    if before["batch_size_per_device"] != now["batch_size_per_device"]:
        display.warn(
            f"positions.conditioned is True and speed.batch_size_per_device was {before['batch_size_per_device']} and is "
            f"{now['batch_size_per_device']} now: the noise of an image depends on it."
        )
    if now["device"] == "cpu" and before.get("threads", now["threads"]) != now["threads"]:
        display.warn(
            f"This run used {before['threads']} CPU thread(s) and continues with {now['threads']}: sums are rounded "
            f"differently, so that it does not continue bit for bit; set OMP_NUM_THREADS={before['threads']} to avoid it."
        )
    if before["loader"] != now["loader"]:
        display.warn(
            f"The loader was {before['loader']} and is {now['loader']} now: the run continues with other crops."
        )
