"""How a run continues: the checkpoint that it continues from, what identifies the run, and what must not change."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stop_mim.data.batches import Batches
from stop_mim.data.sources import absolute_name, is_dataset
from stop_mim.errors import InputError
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.checkpoint import Checkpoint, NewerCheckpoint, checkpoints_in, read_checkpoint
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, require_same
from stop_mim.training.inputs import StepInputs, most_at_once
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.trial import largest_divisor
from stop_mim.training.watch import watch

CHECKPOINT_VERSION = 3


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
            saved = read_checkpoint(file, whole=False)
        except NewerCheckpoint:
            raise
        except InputError as error:
            damaged.append(error)
            continue
        if damaged and not or_older:
            raise InputError(f"{damaged[0]} The checkpoint of step {saved.step} is good: --or-older takes it.")
        version = saved.state.get("run", {}).get("version")
        if isinstance(version, int) and version > CHECKPOINT_VERSION:
            raise NewerCheckpoint(file)
        if version != CHECKPOINT_VERSION:
            # Its runs would continue with other random draws.
            raise InputError(
                f"{file} was saved by another version of stop-mim, whose runs cannot be resumed: start a new run."
            )
        return saved, damaged
    if damaged:
        raise damaged[0]
    if (weights := folder.fact("weights")) is not None:
        raise InputError(
            f"{folder.path} has no checkpoint, and its initial weights ({weights}) were not saved: start a new run with "
            "another --out."
        )
    return None, []


def at_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the config with names of datasets, and so of bad images, that are the same from any directory."""
    labelled = config.probe.data and absolute_name(config.probe.data)
    return replace(config, data=absolute_name(config.data), probe=replace(config.probe, data=labelled))


def with_data_at(config: TrainConfig, data: str | None) -> TrainConfig:
    """Return the config of a run whose data may have moved to `data`; raise InputError if they are not found."""
    if data is not None:
        return at_absolute_paths(replace(config, data=data))
    if not is_dataset(config.data):
        raise InputError(f"The data of this run, '{config.data}', were not found: give their new location with --data.")
    return config


def open_checked_images(
    inputs: StepInputs, folder: RunFolder, display: ProgressDisplay, before: Mapping[str, Any] | None = None
) -> tuple[Batches, dict[str, Any]]:
    """Open the images of a run; return them and the run's identity, which checkpoints keep.

    A run that continues is compared with its identity in the checkpoint, `before`.
    """
    watch.mark("start-up, opening the images")
    config, ranks = inputs.config, inputs.ranks
    bad_images = folder.bad_images_file.with_suffix(".txt" if ranks.is_main else f".rank{ranks.rank}.txt")
    images = inputs.open_images(bad_images, partial(display.update, "decoding images"), display.say)
    identity = {
        "version": CHECKPOINT_VERSION,
        "data": images.source.fingerprint(),
        "contents": images.source.fingerprint(times=False),
        **images.choices,
        "device": ranks.device.type,
        "threads": torch.get_num_threads(),
    }
    # Local copies have other times, and the same contents.
    require_same(f"The data '{config.data}'", identity["contents"], ranks)
    if before is not None:
        check_continuation(before, identity, config.data, display.warn)
    return images, identity


def fit_processes(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Return the config with fewer images at once if the saved number does not divide the images of a process."""
    at_once, images = config.speed.batch_size_per_device, config.optim.batch_size
    if at_once is None or images % ranks.world_size:
        return config
    at_once = largest_divisor(most_at_once(config, images // ranks.world_size), at_once)
    return replace(config, speed=replace(config.speed, batch_size_per_device=at_once))


def load_as_before(config: TrainConfig, before: Mapping[str, Any], device: torch.device) -> TrainConfig:
    """Return the config with the loader and decoder of the checkpoint: decoders round pixels differently."""
    if before["device"] != device.type:
        return config
    left_open = [name for name in ("loader", "decode") if getattr(config.speed, name) == "auto"]
    return replace(config, speed=replace(config.speed, **{name: before[name] for name in left_open}))


def check_continuation(
    before: Mapping[str, Any], now: Mapping[str, Any], data: str, warn: Callable[[str], None]
) -> None:
    """Raise InputError if the data differ from the checkpoint's; warn of changes that affect rounding or random draws."""
    # A copy of the data has other times, and the same contents.
    if before["data"] != now["data"] and before["contents"] != now["contents"]:
        raise InputError(f"The data '{data}' have changed: restore them, or start a new run.")
    if now["device"] == "cpu" and before["threads"] != now["threads"]:
        warn(
            f"This run used {before['threads']} CPU thread(s) and continues with {now['threads']}: sums are rounded "
            f"differently, so that it does not continue bit for bit; set OMP_NUM_THREADS={before['threads']} to avoid it."
        )
    if before["loader"] != now["loader"]:
        warn(f"The loader was {before['loader']} and is {now['loader']} now: the run continues with other crops.")
