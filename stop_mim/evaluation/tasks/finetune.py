"""End-to-end fine-tuning: a copy of the encoder and a linear head, trained together on labelled images.

The test set is scored once, at the end: nothing is chosen by it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from stop_mim.constraints import (
    ABOVE_ZERO,
    AT_LEAST_ZERO,
    FRACTION,
    FRACTION_BELOW_ONE,
    Checked,
    Each,
    Interval,
    Number,
)
from stop_mim.errors import InputError
from stop_mim.evaluation.task import TASKS, TOP, NotApplicable, TrainingTask, plain
from stop_mim.evaluation.tasks.low_shot import FewLabels, LowShotOptions
from stop_mim.options import AugmentConfig
from stop_mim.results import Scalar, Score, accuracy

if TYPE_CHECKING:
    from stop_mim.evaluation.finetuning import FinetuneTraining, RandAugment

Published = Mapping[float, Mapping[str, Any]]
"""Values that depend on the encoder's size, for encoders up to a width."""

# For ViT-B and smaller, ViT-L, and ViT-H and larger.
MAE: Published = {
    768: {"epochs": 100, "lr": 5e-4, "layer_decay": 0.65, "weight_decay": 0.05, "drop_path": 0.1},
    1024: {"epochs": 50, "lr": 1e-3, "layer_decay": 0.75, "weight_decay": 0.05, "drop_path": 0.2},
    math.inf: {"epochs": 50, "lr": 1e-3, "layer_decay": 0.75, "weight_decay": 0.05, "drop_path": 0.3},
}
IJEPA: Published = {1024: {"weight_decay": 0.05}, math.inf: {"weight_decay": 0.4}}


@dataclass(frozen=True)
class FinetuneOptions(Checked, group="finetune"):
    """Fine-tuning with all labels; the defaults are MAE's for ImageNet-1k."""

    published: ClassVar[Published] = MAE
    epochs: Annotated[int | None, ABOVE_ZERO] = None
    """Passes over the training images; by default 100; 50 for ViT-L and larger."""
    batch_size: Annotated[int, ABOVE_ZERO] = 1024
    """Images per update, over all devices and accumulated batches."""
    lr: Annotated[float | None, ABOVE_ZERO] = None
    """Peak learning rate of the head for a batch of 256 images; by default 5e-4; 1e-3 for ViT-L and larger."""
    lowest_lr: Annotated[float, AT_LEAST_ZERO] = 1e-6
    """Learning rate of the head at the end."""
    warmup_epochs: Annotated[float, AT_LEAST_ZERO] = 5.0
    """Epochs in which the learning rate rises from 0 to its peak."""
    layer_decay: Annotated[float | None, Number("give a number above 0, at most 1", above=0, at_most=1)] = None
    """Factor of the learning rate from one layer to the one below it; by default 0.65; 0.75 for ViT-L and larger."""
    weight_decay: Annotated[float | None, AT_LEAST_ZERO] = None
    """Weight decay of AdamW (none on biases, norms, positions, class tokens); by default 0.05."""
    betas: Annotated[tuple[float, float], Each(FRACTION_BELOW_ONE)] = (0.9, 0.999)
    """Betas of AdamW."""
    drop_path: Annotated[float | None, FRACTION_BELOW_ONE] = None
    """Probability of dropping a residual branch in the last layer, earlier ones less; by default 0.1, ViT-L 0.2, ViT-H 0.3."""
    randaugment: str = "rand-m9-mstd0.5-inc1"
    """timm's name of a RandAugment, which changes colours and shapes of training images; empty: none."""
    mixup: Annotated[float, AT_LEAST_ZERO] = 0.8
    """Alpha of mixup, which blends pairs of images; 0: none."""
    cutmix: Annotated[float, AT_LEAST_ZERO] = 1.0
    """Alpha of cutmix, which pastes a box of one image into another; 0: none. With both, each batch has one of them."""
    label_smoothing: Annotated[float, FRACTION_BELOW_ONE] = 0.1
    """Fraction of the target that is spread over all classes."""
    erasing_probability: Annotated[float, FRACTION] = 0.25
    """Probability that a box of an image is replaced by noise."""
    crop_scale: Annotated[tuple[float, float], Interval(at_most=1.0)] = (0.08, 1.0)
    """Smallest and largest area of a random crop, as a fraction of the image."""
    flip_probability: Annotated[float, FRACTION] = 0.5
    """Probability of mirroring a training image left to right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"give at most the {self.epochs} epochs"
        self.require("warmup_epochs", self.epochs is None or self.warmup_epochs <= self.epochs, remedy)

    def filled(self, width: int) -> Any:
        """Return the options, with published values for an encoder of this width in place of None."""
        values = next(values for widest, values in self.published.items() if width <= widest)
        return replace(self, **{k: v for k, v in values.items() if getattr(self, k) is None})


@dataclass(frozen=True)
class LowShotFinetuneOptions(FinetuneOptions, group="finetune_low_shot"):
    """Fine-tuning with few labels; the defaults are I-JEPA's for 1% of ImageNet: nothing is mixed, erased or dropped."""

    published: ClassVar[Published] = IJEPA
    epochs: Annotated[int | None, ABOVE_ZERO] = 50
    """Passes over the training images."""
    batch_size: Annotated[int, ABOVE_ZERO] = 512
    lr: Annotated[float | None, ABOVE_ZERO] = 1.5e-5
    """Peak learning rate of the head for a batch of 256 images, scaled linearly with the batch: 3e-5 for 512."""
    layer_decay: Annotated[float | None, Number("give a number above 0, at most 1", above=0, at_most=1)] = 0.75
    """Factor of the learning rate from one layer to the one below it."""
    weight_decay: Annotated[float | None, AT_LEAST_ZERO] = None
    """Weight decay of AdamW (none on biases, norms, positions, class tokens); by default 0.05; 0.4 for ViT-H and larger."""
    drop_path: Annotated[float | None, FRACTION_BELOW_ONE] = 0.0
    """Probability of dropping a residual branch in the last layer; earlier layers have less."""
    mixup: Annotated[float, AT_LEAST_ZERO] = 0.0
    cutmix: Annotated[float, AT_LEAST_ZERO] = 0.0
    erasing_probability: Annotated[float, FRACTION] = 0.0


@TASKS.register("finetune")
class Finetune(TrainingTask):
    """Fine-tuning with all labels."""

    help = "end-to-end fine-tuning with layer-wise learning-rate decay"
    Options = FinetuneOptions
    options: FinetuneOptions

    def find_options(self) -> FinetuneOptions:
        return super().find_options().filled(self.subject.encoder.dim)

    def check(self) -> None:
        """Raise InputError for encoders that cannot be trained, other image sizes, and unknown RandAugments."""
        from stop_mim.models.encoder import Encoder

        super().check()
        encoder = self.subject.encoder
        self.retouch()
        if not isinstance(encoder, Encoder):
            raise NotApplicable(
                f"'{self.subject.name}' is a {type(encoder).__name__}: only timm's Vision Transformers can be fine-tuned; "
                "use linear-sgd."
            )
        own = tuple(rows * side for rows, side in zip(encoder.grid, encoder.patch_size, strict=True))
        if encoder.image_size != own:
            raise NotApplicable(
                f"image_size is {encoder.image_size[0]}: fine-tuning runs at the encoder's own size, {own[0]}; leave "
                "image_size out."
            )

    def variant(self) -> dict[str, Scalar]:
        """Return the coordinates of the scores."""
        return {}

    def retouch(self) -> "RandAugment | None":
        from stop_mim.evaluation.finetuning import RandAugment

        encoder, name = self.subject.encoder, self.options.randaugment
        try:
            return RandAugment(name, encoder.image_size, encoder.mean) if name else None
        except (AssertionError, ValueError) as error:
            raise InputError(
                f"{self.name}.randaugment is '{name}': give a name of timm's such as rand-m9-mstd0.5-inc1, or '' for none."
            ) from error

    def training(self) -> "FinetuneTraining":
        from stop_mim.evaluation.finetuning import FinetuneTraining

        options = self.options
        augment = AugmentConfig(crop_scale=options.crop_scale, flip_probability=options.flip_probability)
        conditions = replace(self.conditions(augment), retouch=self.retouch())
        return FinetuneTraining(self.subject.encoder, self.training_images(), options, conditions)

    def results(self, training: "FinetuneTraining") -> Iterator[Score]:
        (values,), images = training.score(self.data.test)
        for top, value in zip(TOP, values, strict=True):
            if top < self.data.classes:
                yield accuracy(top, value, images, variant=self.variant(), headline=top == 1)
        yield Score("train_loss", training.train_loss, variant=self.variant(), unit="")


@TASKS.register("finetune-low-shot")
class FinetuneLowShot(FewLabels, Finetune):
    """Fine-tuning with the first amount, or the list, of the options of low-shot."""

    help = "fine-tuning with the first amount, or the list, of low-shot"
    Options = LowShotFinetuneOptions

    @property
    def few(self) -> LowShotOptions:
        """The options of low-shot, with one draw of one amount."""
        few = super().few
        return replace(few, amounts=few.amounts[:1], draws=1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "amount": self.few.amounts[0], "list_file": plain(self.few)["list_file"]}

    def variant(self) -> dict[str, Scalar]:
        (amount,) = self.draws
        return {"amount": amount}
