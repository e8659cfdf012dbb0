"""What an evaluation is asked for, as frozen data: every field has a docstring, which the command line shows as its help."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stop_mim.evaluation.finetune import FinetuneConfig, LowShotFinetuneConfig
from stop_mim.evaluation.video import PropagationConfig
from stop_mim.training.config import SpeedConfig, require

TaskName = Literal["all", "linear", "linear-sgd", "low-shot", "knn", "finetune", "finetune-low-shot", "clevr", "video"]


@dataclass(frozen=True)
class LinearOptions:
    """The fast linear probe."""

    standardise: tuple[bool, ...] = (True, False)
    """With standardised features (+bn), without, or both; the held-out images choose."""
    layers: tuple[int, ...] = (1, 4)
    """Features of the last layer, of this many last layers side by side, or of several such choices; the same choose."""


@dataclass(frozen=True)
class LowShotConfig:
    """How few labels are used."""

    amounts: tuple[str, ...] = ("1%", "10%")
    """Parts of the training images (1%) or images of each class (5)."""
    list_file: Path | None = None
    """A text file with the names of the labelled images, one a line, instead of the amounts."""
    draws: int = 3
    """How many times each amount is drawn."""


@dataclass(frozen=True)
class KnnConfig:
    """Nearest neighbours."""

    neighbours: tuple[int, ...] = (10, 20, 100, 200)
    """Numbers of neighbours that vote."""
    temperature: float = 0.07
    """A neighbour weighs exp(cosine / temperature)."""

    def __post_init__(self) -> None:
        numbers = bool(self.neighbours) and min(self.neighbours) > 0
        require(self, "knn", "neighbours", numbers, "give one or more whole numbers above zero")
        require(self, "knn", "temperature", 0 < self.temperature < math.inf, "give a number above zero")


@dataclass(frozen=True)
class LinearSGDOptions:
    """The SGD protocol; what is not given is as the data's protocol has it."""

    epochs: int | None = None
    """Passes over the training images."""
    batch_size: int = 256
    """Images an update, over all devices."""
    lrs: tuple[float, ...] | None = None
    """Learning rates for a batch of 256, tried at once; the held-out images choose."""


@dataclass(frozen=True)
class VideoConfig:
    """Video object segmentation."""

    split: str = "val"
    """Which list of DAVIS's folder ImageSets names the sequences, such as val, train or 2016/val; without lists: all."""
    masks: Path | None = None
    """Folder for the predicted masks, in DAVIS's format."""
    overlays: bool = False
    """Draw the masks over the frames too, as contact sheets and animations."""
    propagation: PropagationConfig = field(default_factory=PropagationConfig)


@dataclass(frozen=True)
class EvaluateConfig:
    """Score encoders on tasks; several encoders are compared in one table."""

    task: tuple[TaskName, ...] = ("all",)
    """What to do: all is whatever the data allow; clevr is the linear probe of counts and of distances."""
    data: str = ""
    """Labelled images (a folder, a parquet file or folder of them, torchvision:NAME …), or videos in DAVIS's layout."""
    test_data: str | None = None
    """Test images; not given: the data's own test or validation split, or else a fifth of the images, held out."""
    label: str = "auto"
    """Which label, of data that have several."""
    protocol: str = "auto"
    """Whose numbers: imagenet, places205, places365, inat18, cifar100, clevr-count, clevr-dist or generic; auto: the data's."""
    image_size: int | None = None
    """Side of the images in pixels; not given: the size that the encoder was made for."""
    seed: int = 0
    """Seed of held-out parts, draws, orders and augmentation."""
    foreground: bool = False
    """Score all objects of a video as one, as DAVIS 2016 does."""
    json: Path | None = None
    """File for all results, as JSON."""
    csv: Path | None = None
    """File for all results, a number a line."""
    linear: LinearOptions = field(default_factory=LinearOptions)
    low_shot: LowShotConfig = field(default_factory=LowShotConfig)
    knn: KnnConfig = field(default_factory=KnnConfig)
    linear_sgd: LinearSGDOptions = field(default_factory=LinearSGDOptions)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    finetune_low_shot: LowShotFinetuneConfig = field(default_factory=LowShotFinetuneConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
