"""The configuration of a pretraining run; the command line shows the docstring of a field as its help.

The groups `speed`, `log`, `probe` and `checkpoint` do not change what is learned.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from stop_mim.constraints import (
    ABOVE_ZERO,
    AT_LEAST_ZERO,
    COUNT,
    FRACTION,
    FRACTION_BELOW_ONE,
    PERCENTAGE,
    SEED,
    Checked,
    Each,
    Number,
    OnlyWith,
)
from stop_mim.errors import InputError
from stop_mim.models.config import EncoderConfig, ObjectiveConfig, PositionsConfig, PredictorConfig
from stop_mim.options import AugmentConfig, Decode, LoaderMode, MaskConfig

DerivedField = Literal["batch_size", "epochs", "lr", "start_lr", "final_lr", "warmup_epochs"]
Sharding = Literal["none", "full", "hybrid"]


@dataclass(frozen=True)
class OptimConfig(Checked, group="optim"):
    """AdamW, its schedules, and the momentum of the target encoder."""

    epochs: Annotated[int, COUNT] = 300
    """Passes over the data."""
    batch_size: Annotated[int, COUNT] = 2048
    """Images per update, over all devices and accumulated batches."""
    lr: Annotated[float, ABOVE_ZERO] = 8e-4
    """Peak learning rate."""
    start_lr: Annotated[float, AT_LEAST_ZERO] = 2e-4
    """Learning rate at the first step."""
    final_lr: Annotated[float, AT_LEAST_ZERO] = 1e-4
    """Learning rate at the last step."""
    warmup_epochs: Annotated[float, AT_LEAST_ZERO] = 15
    """Epochs from the first step to the peak learning rate."""
    weight_decay: Annotated[float, AT_LEAST_ZERO] = 0.04
    """Weight decay at the first step; biases, norms and other 1-d parameters have none."""
    final_weight_decay: Annotated[float, AT_LEAST_ZERO] = 0.4
    """Weight decay at the last step."""
    decay_mask_token: bool = False
    """Decay the mask token m̃ too, as the releases do."""
    hold_after_epoch: Annotated[float | None, AT_LEAST_ZERO] = None
    """Epoch after which learning rate and weight decay stay constant."""
    betas: Annotated[tuple[float, float], Each(FRACTION_BELOW_ONE)] = (0.9, 0.999)
    """AdamW's betas."""
    clip_gradient_norm: Annotated[float | None, ABOVE_ZERO] = None
    """Largest norm of the gradient; not given: no limit."""
    ema_start: Annotated[float | None, FRACTION] = None
    """Momentum of the target encoder at the first step; not given: 0.996, or 1 - 10 / steps where that is less."""
    ema_final: Annotated[float, FRACTION] = 1.0
    """Momentum of the target encoder at the last step."""
    derive: tuple[DerivedField, ...] = ()
    """Fields of this group that follow from the number of images and the device; one that is given is not derived."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("warmup_epochs", self.warmup_epochs <= self.epochs, f"give at most optim.epochs, {self.epochs}")


@dataclass(frozen=True)
class DeviceConfig(Checked, group="speed"):
    """Device and loading; nothing here changes scores, except for rounding and random draws."""

    device: str = "auto"
    """cpu, cuda or cuda:NUMBER; auto: the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast or full precision; auto: bf16 on a GPU, fp32 on the CPU."""
    batch_size_per_device: Annotated[int | None, ABOVE_ZERO] = None
    """Images per batch on one device; training accumulates gradients over batches; not given: training takes as many as fit."""
    loader: LoaderMode = "auto"
    """resident: images of one size, decoded once into memory; streaming: decoded by workers; auto: resident if they fit."""
    workers: Annotated[int | None, AT_LEAST_ZERO] = None
    """Worker processes that decode streamed images; not given: one per core, at most eight."""
    decode: Decode = "auto"
    """Where streamed JPEGs are decoded: cpu or gpu; auto: on the GPU if it can and there are few workers."""
    timeout_minutes: Annotated[float, ABOVE_ZERO] = 5.0
    """If no process makes progress for this long, all of them end and name the one that is stuck."""


@dataclass(frozen=True)
class SpeedConfig(DeviceConfig):
    """Device and speed; nothing here changes what is learned, except for rounding and random draws."""

    compile: bool | None = None
    """Compile the objective with torch.compile; not given: on a GPU, for runs of at least 500 steps."""
    graph: bool | None = None
    """Capture the step as one CUDA graph; not given: on a single GPU, for runs of at least 20 steps."""
    sharding: Sharding = "none"
    """Spread the weights over the processes: full: over all (FSDP2); hybrid: over those of a machine (HSDP); none: DDP."""
    reshard: Annotated[bool, OnlyWith("speed.sharding", ("full", "hybrid"))] = True
    """Free gathered weights after a layer's forward pass: less memory, a quarter more communication."""
    recompute: bool = False
    """Recompute activations of the layers in the backward pass: less memory, about a third slower."""


@dataclass(frozen=True)
class LogConfig(Checked, group="log"):
    """What is recorded during training."""

    every_steps: Annotated[int, COUNT] = 10
    """Steps between two lines of metrics.jsonl."""
    health_every_steps: Annotated[int, COUNT] = 100
    """Steps between two measurements of the health signs."""
    tensorboard: bool = True
    """Write TensorBoard events too."""
    wandb: str | None = None
    """Project of Weights & Biases to record to; not given: none."""
    mlflow: str | None = None
    """Experiment of MLflow to record to; not given: none."""
    trial_steps: Annotated[int, AT_LEAST_ZERO] = 0
    """Trial steps before a new run, undone afterwards, that estimate memory, speed and duration; 0: none."""


@dataclass(frozen=True)
class ProbeConfig(Checked, group="probe"):
    """A linear probe and kNN on labelled images during training; the encoder learns nothing from them.

    The images are kept in memory, resized to little more than the training size; of more than 4 GiB, a part chosen by the seed.
    """

    data: str | None = None
    """Labelled dataset: its train split trains the probe, its test split is scored; not given: no probe."""
    label: str = "auto"
    """Which label, of those that are integers: class, count …; auto: class if there is one, else the first."""
    batch_size: Annotated[int, Number("give a number above one", above=1)] = 256
    """Labelled images per batch."""
    every_steps: Annotated[int, COUNT] = 4
    """Steps between two batches of labelled images."""
    score_every_steps: Annotated[int, COUNT] = 500
    """Steps between two scores; the last step is always scored."""
    lr: Annotated[float, ABOVE_ZERO] = 1e-3
    """Learning rate of the linear probe (AdamW, constant)."""
    neighbours: Annotated[int, ABOVE_ZERO] = 20
    """Neighbours of kNN."""
    memory: Annotated[int, COUNT] = 4096
    """Newest labelled images among which kNN searches."""
    test_images: Annotated[int, COUNT] = 2000
    """Largest number of test images that are scored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("neighbours", self.neighbours <= self.memory, f"give at most probe.memory, {self.memory}")


@dataclass(frozen=True)
class CheckpointConfig(Checked, group="checkpoint"):
    """When checkpoints are saved, and which are kept."""

    every_steps: Annotated[int, COUNT] = 1000
    """Steps between two checkpoints."""
    keep: Annotated[int, ABOVE_ZERO] = 2
    """Number of newest checkpoints that are kept."""
    milestone_every_epochs: Annotated[int | None, ABOVE_ZERO] = None
    """Epochs between two checkpoints that are never deleted."""


@dataclass(frozen=True)
class TrainConfig(Checked):
    """A pretraining run."""

    data: str = "scenes"
    """Images: scenes, a folder, a parquet file or glob, torchvision:NAME, hf:OWNER/NAME or wds:SHARDS."""
    max_bad: Annotated[str, PERCENTAGE, tyro.conf.arg(aliases=["--data.max-bad"])] = "1%"
    """Largest fraction of unreadable images: they are skipped and listed; more of them stop the run."""
    out: str | None = None
    """Run directory; not given: runs/RECIPE-DATE-TIME."""
    seed: Annotated[int, SEED] = 0
    """Seed of weights, data order, crops, masks and noise."""
    stop_after_steps: Annotated[int | None, Number("give a number above 0, or leave it out", above=0)] = None
    """Stop (and save) after this many steps; the schedules are still those of the whole run."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    masks: MaskConfig = field(default_factory=MaskConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    log: LogConfig = field(default_factory=LogConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def require_data(config: TrainConfig) -> None:
    """Raise InputError unless the configuration names a dataset; most recipes have none."""
    if not config.data:
        raise InputError("data is not given: add --data with a folder, a parquet file or another dataset.")


def to_json(config: TrainConfig) -> str:
    """Return the configuration as readable JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their paths, such as optim.lr."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
