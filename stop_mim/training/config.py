"""What a run is, as frozen data: every field has a docstring, which the command line shows as its help.

Groups that change results come first; `speed`, `log`, `probe` and `checkpoint` only change how fast and how visible
it is.
"""

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from stop_mim.data.augment import AugmentConfig
from stop_mim.data.batches import Decode, LoaderMode
from stop_mim.errors import InputError
from stop_mim.models.encoder import EncoderSize
from stop_mim.models.ijepa import TargetResolution
from stop_mim.positions import ApplyTo, Convention


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is predicted of the masked patches."""

    kind: Literal["ijepa", "mae", "data2vec"] = "ijepa"
    """ijepa: features, by a predictor; mae: pixels, by a decoder (the predictor group); data2vec: features, by the encoder."""
    target_layers: int = 1
    """Last layers of the target encoder whose layer-normed features are averaged (ijepa, data2vec)."""
    beta: float = 1.0
    """Error from which smooth-L1 is linear (ijepa, data2vec)."""
    norm_pixels: bool = True
    """Normalise the pixels of every patch by their own mean and variance (mae)."""
    target_resolution: TargetResolution = "full"
    """Targets at the patches' resolution, or at half of it by bilinear resizing or max pooling (ijepa)."""
    l1_strength: float = 0.0
    """How much the sum of the absolute values of A adds to the loss (ijepa)."""

    def __post_init__(self) -> None:
        require_choices(self, "objective")
        require(self, "objective", "target_layers", self.target_layers > 0, "give a number above zero")
        require(self, "objective", "beta", 0 < self.beta < math.inf, "give a number above zero")
        require(self, "objective", "l1_strength", 0 <= self.l1_strength < math.inf, "give zero or a positive number")


@dataclass(frozen=True)
class EncoderConfig:
    """The Vision Transformer that is trained."""

    size: EncoderSize = "base"
    """Width, depth and heads by name: tiny 192x12, small 384x12, base 768x12, large 1024x24, huge 1280x32, giant 1408x40."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the training images in pixels."""
    patch_size: int = 16
    """Side of a patch in pixels."""
    width: int | None = None
    """Width instead of the size's own."""
    depth: int | None = None
    """Number of layers instead of the size's own."""
    heads: int | None = None
    """Number of attention heads instead of the size's own."""
    drop_path: float = 0.0
    """Chance that a residual branch is left out, for the last layer; earlier ones have less."""

    def __post_init__(self) -> None:
        require_choices(self, "encoder")
        for name in ("patch_size", "width", "depth", "heads"):
            value = getattr(self, name)
            require(self, "encoder", name, value is None or value > 0, "give a number above zero")
        require(self, "encoder", "drop_path", 0 <= self.drop_path < 1, "give a number from 0 to below 1")


@dataclass(frozen=True)
class PredictorConfig:
    """The narrow transformer that predicts the targets, which MAE calls its decoder; data2vec has none."""

    width: int = 384
    """Width of its tokens."""
    depth: int = 6
    """Number of layers."""
    heads: int | None = None
    """Number of attention heads; as many as the encoder's when not given."""
    shared_context: bool = False
    """Context tokens attend to each other alone, once for all target blocks (ijepa; ours, not the paper's; faster)."""

    def __post_init__(self) -> None:
        require(self, "predictor", "heads", self.heads is None or self.heads > 0, "give a number above zero")


@dataclass(frozen=True)
class PositionsConfig:
    """The predictor's positions: fixed for I-JEPA, stochastic for StoP."""

    kind: Literal["stochastic", "sincos", "learned", "jittered"] = "stochastic"
    """Stochastic (StoP, around sine-cosine positions), sincos (I-JEPA), learned, or jittered (ours: noisy coordinates)."""
    sigma: float = 0.25
    """Strength of the noise: with the paper's convention the variance of n in Σ = σ A Aᵀ, with the release's its std."""
    sigma_start: float | None = None
    """Sigma at the first step, from which it moves to sigma along the schedule; not given: the same."""
    sigma_schedule: Literal["linear", "cosine"] = "linear"
    """How sigma moves from sigma_start to sigma over the run."""
    apply_to: ApplyTo = "masked"
    """Which tokens get noisy positions."""
    covariance: str = "tied"
    """Σ: tied, identity, diagonal, untied or low_rank(r)."""
    convention: Convention = "paper"
    """paper: sigma is a variance and masked tokens have a learned m̃. release: a std, the projection's bias and no m̃."""
    conditioned: bool = False
    """Deal the noise of stochastic positions out to images as a head on their context says (ours, not the paper's)."""
    jitter_scale: float = 0.5
    """Standard deviation of jittered coordinates, in patches."""
    jitter_learned: bool = False
    """Learn the scales of rows and columns from jitter_scale on; nothing keeps them from vanishing."""

    def __post_init__(self) -> None:
        require_choices(self, "positions")
        for name in ("sigma", "sigma_start", "jitter_scale"):
            value = getattr(self, name)
            holds = value is None or (math.isfinite(value) and value >= 0)
            require(self, "positions", name, holds, "give a finite number that is zero or positive")
        starts = self.jitter_scale > 0 or not self.jitter_learned
        require(self, "positions", "jitter_scale", starts, "start a learned scale above zero")


@dataclass(frozen=True)
class MaskConfig:
    """Which patches are context and which are targets."""

    kind: Literal["multiblock", "random", "blockwise"] = "multiblock"
    """I-JEPA's blocks (multiblock), uniform random patches (MAE), or rectangles that are one target (blockwise, data2vec)."""
    n_blocks: int = 4
    """Target blocks an image."""
    target_scale: tuple[float, float] = (0.15, 0.2)
    """Smallest and largest area of a target block, or of a blockwise rectangle, as a part of the image."""
    target_aspect: tuple[float, float] = (0.75, 1.5)
    """Smallest and largest height over width of a target block, or of a blockwise rectangle."""
    context_scale: tuple[float, float] = (0.85, 1.0)
    """Smallest and largest area of the context block, before the targets are taken out."""
    context_aspect: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest height over width of the context block."""
    target_tokens: int | None = None
    """Patches kept of each target block; not given: as many as nine blocks in ten have."""
    context_tokens: int | None = None
    """Patches kept of each context; not given: as many as nineteen contexts in twenty have."""
    mask_ratio: float = 0.75
    """Part of the patches that random and blockwise masks make targets."""
    compat: Literal["release"] | None = None
    """release: sample as the released I-JEPA and StoP code does, with its defects."""

    def __post_init__(self) -> None:
        require_choices(self, "masks")
        for name in ("target_tokens", "context_tokens"):
            value = getattr(self, name)
            require(self, "masks", name, value is None or value > 0, "give a number above zero")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedules, and the average over time that is the target encoder."""

    epochs: int = 300
    """Passes over the data."""
    batch_size: int = 2048
    """Images an update, over all devices and accumulated batches."""
    lr: float = 8e-4
    """Learning rate at its peak."""
    start_lr: float = 2e-4
    """Learning rate at the first step."""
    final_lr: float = 1e-4
    """Learning rate at the last step."""
    warmup_epochs: float = 15
    """Epochs from the start to the peak of the learning rate."""
    weight_decay: float = 0.04
    """Weight decay at the first step; biases, norms and other 1-d parameters have none."""
    final_weight_decay: float = 0.4
    """Weight decay at the last step."""
    hold_after_epoch: float | None = None
    """Epoch after which learning rate and weight decay no longer change."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two averaging factors."""
    clip_gradient_norm: float | None = None
    """Largest norm of the gradient; not given: no limit."""
    ema_start: float = 0.996
    """Momentum of the target encoder at the first step."""
    ema_final: float = 1.0
    """Momentum of the target encoder at the last step."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr"):
            require(self, "optim", name, 0 < getattr(self, name) < math.inf, "give a number above zero")
        for name in ("start_lr", "final_lr", "warmup_epochs", "weight_decay", "final_weight_decay"):
            require(self, "optim", name, 0 <= getattr(self, name) < math.inf, "give zero or a positive number")
        for name in ("ema_start", "ema_final"):
            require(self, "optim", name, 0 <= getattr(self, name) <= 1, "give a number from 0 to 1")
        require(self, "optim", "betas", all(0 <= beta < 1 for beta in self.betas), "give numbers from 0 to below 1")
        hold = self.hold_after_epoch
        require(self, "optim", "hold_after_epoch", hold is None or hold >= 0, "give zero or a positive number")
        clip = self.clip_gradient_norm
        require(self, "optim", "clip_gradient_norm", clip is None or clip > 0, "give a number above zero")
        require(self, "optim", "warmup_epochs", self.warmup_epochs <= self.epochs, "it must not be above optim.epochs")


@dataclass(frozen=True)
class SpeedConfig:
    """Where and how fast it runs: nothing here changes what is learned, but for rounding and random draws."""

    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto: the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocast or full precision; auto: bf16 on a GPU, fp32 on the CPU."""
    batch_size_per_device: int | None = None
    """Images at a time on one device; gradients are accumulated up to optim.batch_size; not given: all at once."""
    loader: LoaderMode = "auto"
    """resident: images decoded once into the device's memory; streaming: by workers; auto: resident where nothing is lost."""
    workers: int | None = None
    """Processes that decode streamed images; not given: one a core, at most eight."""
    decode: Decode = "auto"
    """Where streamed JPEGs are decoded: cpu or gpu; auto: on the GPU if it can and workers are few."""
    compile: bool | None = None
    """Compile the objective with torch.compile; not given: on a GPU, for runs of at least 500 steps."""
    graph: bool | None = None
    """Capture the whole step as one CUDA graph; not given: on one GPU, for runs of at least 20 steps."""
    fp8_target: bool = False
    """Let the target encoder multiply in eight bits (ijepa; GPUs from Hopper or Ada on): faster, a little coarser."""
    half_residual: bool = False
    """Keep tokens in bf16 between the layers too, not within them alone (bf16 only): less memory and time, a little coarser."""
    recompute: bool = False
    """Keep no activations within the layers and compute them again for the gradient: less memory, about a third slower."""

    def __post_init__(self) -> None:
        require_choices(self, "speed")
        size, workers = self.batch_size_per_device, self.workers
        require(self, "speed", "batch_size_per_device", size is None or size > 0, "give a number above zero")
        require(self, "speed", "workers", workers is None or workers >= 0, "give zero or a positive number")


@dataclass(frozen=True)
class LogConfig:
    """What is written down while it trains."""

    every_steps: int = 10
    """Steps between two lines of metrics.jsonl."""
    health_every_steps: int = 100
    """Steps between two looks at the health signs."""
    tensorboard: bool = True
    """Write TensorBoard events too."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "health_every_steps"):
            require(self, "log", name, getattr(self, name) > 0, "give a number above zero")


@dataclass(frozen=True)
class ProbeConfig:
    """Labelled images that tell, while it trains, what the features are good for; the encoder learns nothing from them.

    They are kept in memory, resized to little more than the training size: of more than 4 GiB a part that the seed chooses.
    """

    data: str | None = None
    """Labelled data set by name: its train split teaches the probe, its test split is scored; not given: no probe."""
    label: str = "auto"
    """Which of its labels, if they are whole numbers: class, count …; auto: class if there is one, else the first."""
    batch_size: int = 256
    """Labelled images at a time."""
    every_steps: int = 4
    """Steps between two batches of labelled images."""
    score_every_steps: int = 500
    """Steps between two scores; the last step is always scored."""
    lr: float = 1e-3
    """Learning rate of the linear probe (AdamW), which stays as it is."""
    neighbours: int = 20
    """Nearest neighbours that vote for a class."""
    memory: int = 4096
    """Newest labelled images among which neighbours are looked for."""
    test_images: int = 2000
    """Images of the test split that are scored, at most."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "score_every_steps", "neighbours", "memory", "test_images"):
            require(self, "probe", name, getattr(self, name) > 0, "give a number above zero")
        require(self, "probe", "batch_size", self.batch_size > 1, "give a number above one")
        require(self, "probe", "lr", 0 < self.lr < math.inf, "give a number above zero")
        require(self, "probe", "neighbours", self.neighbours <= self.memory, "it must not be above probe.memory")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    every_steps: int = 1000
    """Steps between two checkpoints."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    milestone_every_epochs: int | None = None
    """Every so many epochs the checkpoint is kept for good."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep"):
            require(self, "checkpoint", name, getattr(self, name) > 0, "give a number above zero")
        every = self.milestone_every_epochs
        require(self, "checkpoint", "milestone_every_epochs", every is None or every > 0, "give a number above zero")


@dataclass(frozen=True)
class TrainConfig:
    """A pretraining run."""

    data: str = "scenes"
    """Images: scenes, a folder, a parquet file or glob, torchvision:NAME, hf:OWNER/NAME or wds:SHARDS."""
    out: str | None = None
    """Folder of the run; not given: runs/RECIPE-DATE-TIME."""
    seed: int = 0
    """Seed of weights, data order, crops, masks and noise."""
    stop_after_steps: int | None = None
    """Stop (and save) after so many steps; the schedules stay those of the whole run."""
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

    def __post_init__(self) -> None:
        stop = self.stop_after_steps
        if stop is not None and stop < 1:
            raise InputError(f"stop_after_steps is {stop}: give a number above zero, or leave it out.")


def to_json(config: TrainConfig) -> str:
    """The configuration as readable JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> TrainConfig:
    """The configuration that `to_json` wrote; an unknown field is an error, a missing one gets its default."""
    return _from_plain(TrainConfig, json.loads(text), "")


def _from_plain(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        known = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise InputError(f"The configuration has an unknown field '{path}{unknown[0]}': remove it.")
        return kind(**{name: _from_plain(known[name], part, f"{path}{name}.") for name, part in value.items()})
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and kind in (float, float | None):
        return float(value)
    return value


def require_choices(config: object, group: str) -> None:
    """A misspelt choice is refused here: further on it would quietly be one of the others."""
    for name, kind in typing.get_type_hints(type(config)).items():
        literals = [part for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is Literal]
        choices = [choice for part in literals for choice in typing.get_args(part)]
        value = getattr(config, name)
        optional = type(None) in typing.get_args(kind)
        holds = not choices or value in choices or (optional and value is None)
        require(config, group, name, holds, f"choose {' or '.join(map(str, choices))}")


def require(config: object, group: str, name: str, holds: bool, remedy: str) -> None:
    """Raises InputError, with the field's name and value and the remedy, unless the condition holds."""
    if not holds:
        raise InputError(f"{group}.{name} is {getattr(config, name)}: {remedy}.")
