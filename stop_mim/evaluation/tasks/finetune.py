"""End-to-end fine-tuning: a copy of the encoder and a linear head, trained together on labelled images.

The test set is scored once, at the end: nothing is chosen by it.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from timm.data.auto_augment import posterize, rand_augment_transform
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.layers import DropPath, calculate_drop_path_rates
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.labelled_training import LR_IMAGES, TOP, Conditions, LabelledTraining, TrainingTask
from stop_mim.evaluation.task import TASKS, options_of, plain
from stop_mim.evaluation.tasks.low_shot import check_draws, draw_notes, label_draws
from stop_mim.models.encoder import SIZES, Encoder
from stop_mim.options import AugmentConfig
from stop_mim.results import Scalar, Score, accuracy
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.distributed import reduce_mean, share
from stop_mim.training.schedules import warmup_cosine
from stop_mim.training.step import Outcome, StepOutcome
from stop_mim.training.trainer import Trainer

HEAD_STD = 2e-5
# Parts of timm's models after the normed patch tokens, which a prediction does not depend on.
UNUSED_PARTS = ("fc_norm", "attn_pool", "head", "head_dist")


@dataclass(frozen=True)
class FinetuneOptions(Checked, group="finetune"):
    """Fine-tuning with all labels; the defaults are MAE's for ImageNet-1k."""

    epochs: Annotated[int | None, ABOVE_ZERO] = None
    """Passes over the training images; by default 100, of ViT-L and larger 50."""
    batch_size: Annotated[int, ABOVE_ZERO] = 1024
    """Images per update, over all devices and accumulated batches."""
    lr: Annotated[float | None, ABOVE_ZERO] = None
    """Peak learning rate of the head for a batch of 256 images; by default 5e-4, of ViT-L and larger 1e-3."""
    lowest_lr: Annotated[float, AT_LEAST_ZERO] = 1e-6
    """Learning rate of the head at the end."""
    warmup_epochs: Annotated[float, AT_LEAST_ZERO] = 5.0
    """Epochs in which the learning rate rises from 0 to its peak."""
    layer_decay: Annotated[float | None, Number("give a number above 0, at most 1", above=0, at_most=1)] = None
    """Factor of the learning rate from one layer to the one below it; by default 0.65, of ViT-L and larger 0.75."""
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

    @classmethod
    def published(cls, width: int) -> dict[str, Any]:
        """Return the published values that depend on the encoder's size: MAE's for ViT-B, ViT-L and ViT-H."""
        if width <= SIZES["base"].width:
            return {"epochs": 100, "lr": 5e-4, "layer_decay": 0.65, "weight_decay": 0.05, "drop_path": 0.1}
        drop_path = 0.2 if width <= SIZES["large"].width else 0.3
        return {"epochs": 50, "lr": 1e-3, "layer_decay": 0.75, "weight_decay": 0.05, "drop_path": drop_path}

    def filled(self, width: int) -> Any:
        """Return the options with published values, for an encoder of this width, where none are given."""
        return replace(self, **{k: v for k, v in self.published(width).items() if getattr(self, k) is None})


@dataclass(frozen=True)
class LowShotFinetuneOptions(FinetuneOptions, group="finetune_low_shot"):
    """Fine-tuning with few labels; the defaults are I-JEPA's for 1% of ImageNet: nothing is mixed, erased or dropped."""

    epochs: Annotated[int | None, ABOVE_ZERO] = 50
    """Passes over the training images."""
    batch_size: Annotated[int, ABOVE_ZERO] = 512
    lr: Annotated[float | None, ABOVE_ZERO] = 1.5e-5
    """Peak learning rate of the head for a batch of 256 images, scaled linearly with the batch: 3e-5 for 512."""
    layer_decay: Annotated[float | None, Number("give a number above 0, at most 1", above=0, at_most=1)] = 0.75
    """Factor of the learning rate from one layer to the one below it."""
    weight_decay: Annotated[float | None, AT_LEAST_ZERO] = None
    """Weight decay of AdamW (none on biases, norms, positions, class tokens); by default 0.05, of ViT-H and larger 0.4."""
    drop_path: Annotated[float | None, FRACTION_BELOW_ONE] = 0.0
    """Probability of dropping a residual branch in the last layer; earlier layers have less."""
    mixup: Annotated[float, AT_LEAST_ZERO] = 0.0
    cutmix: Annotated[float, AT_LEAST_ZERO] = 0.0
    erasing_probability: Annotated[float, FRACTION] = 0.0

    @classmethod
    def published(cls, width: int) -> dict[str, Any]:
        """Return the published value that depends on the encoder's size: I-JEPA's for ViT-L and ViT-H."""
        return {"weight_decay": 0.05 if width <= SIZES["large"].width else 0.4}


@TASKS.register("finetune")
class Finetune(TrainingTask):
    """Fine-tuning with all labels."""

    help = "end-to-end fine-tuning with layer-wise learning-rate decay"
    Options = FinetuneOptions
    options: FinetuneOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.options = self.options.filled(self.subject.encoder.dim)

    def check(self) -> None:
        """Refuse encoders that cannot be trained, other sizes of images than the encoder's own, and unknown names."""
        super().check()
        encoder = self.subject.encoder
        self.retouch()
        if not isinstance(encoder, Encoder):
            raise InputError(
                f"'{self.subject.name}' is a {type(encoder).__name__}: only timm's Vision Transformers can be fine-tuned; "
                "use linear-sgd."
            )
        own = tuple(rows * side for rows, side in zip(encoder.grid, encoder.patch_size, strict=True))
        if encoder.image_size != own:
            raise InputError(
                f"image_size is {encoder.image_size[0]}: fine-tuning runs at the encoder's own size, {own[0]}; leave "
                "image_size out."
            )

    def variant(self) -> dict[str, Scalar]:
        """Return the coordinates of the scores."""
        return {}

    def retouch(self) -> "RandAugment | None":
        """Return the RandAugment of the options."""
        encoder, name = self.subject.encoder, self.options.randaugment
        try:
            return RandAugment(name, encoder.image_size, encoder.mean) if name else None
        except (AssertionError, ValueError) as error:
            raise InputError(
                f"{self.name}.randaugment is '{name}': give a name of timm's such as rand-m9-mstd0.5-inc1, or '' for none."
            ) from error

    def training(self) -> "FinetuneTraining":
        options = self.options
        augment = AugmentConfig(crop_scale=options.crop_scale, flip_probability=options.flip_probability)
        conditions = replace(self.conditions(augment), retouch=self.retouch())
        return FinetuneTraining(self.subject.encoder, self.training_images(), options, conditions)

    def results(self, training: "FinetuneTraining") -> Iterator[Score]:
        for top, value in zip(TOP, training.score(self.data.test)[0].tolist(), strict=True):
            yield accuracy(top, value, len(self.data.test), variant=self.variant(), headline=top == 1)
        yield Score("train_loss", training.train_loss, variant=self.variant(), unit="")


@TASKS.register("finetune-low-shot")
class FinetuneLowShot(Finetune):
    """Fine-tuning with the first amount, or the list, of the options of low-shot."""

    help = "fine-tuning with the first amount, or the list, of low-shot"
    Options = LowShotFinetuneOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.few = options_of(self.config, "low-shot")

    def check(self) -> None:
        """Refuse amounts or a list that do not fit the data, too."""
        super().check()
        check_draws(self.draw, self.few, self.data)

    def notes(self) -> Iterator[str]:
        return draw_notes(self.draw, len(self.data.train))

    @cached_property
    def draw(self) -> dict[str, list[np.ndarray]]:
        """The labelled images, by their amount."""
        one = replace(self.few, amounts=self.few.amounts[:1], draws=1)
        return label_draws(one, self.data.train, self.config.seed)

    def settings(self) -> dict[str, Any]:
        list_file = plain(self.few)["list_file"]
        return {**super().settings(), "amount": self.few.amounts[0], "list_file": list_file}

    def training_images(self) -> LabelledSet:
        ((images,),) = self.draw.values()
        return replace(self.data.train, indices=images)

    def variant(self) -> dict[str, Scalar]:
        """Return the amount of labels."""
        (amount,) = self.draw
        return {"amount": amount}


class Classifier(nn.Module):
    """An encoder and a linear head on its average-pooled normed patch tokens."""

    def __init__(self, encoder: Encoder, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.encoder = encoder
        # Without torch's initialisation, which would advance the global generator.
        self.head = nn.utils.skip_init(nn.Linear, encoder.dim, classes)
        # Almost zero: the first updates change the head alone, before they reach into the encoder.
        nn.init.trunc_normal_(self.head.weight, std=HEAD_STD, a=-2 * HEAD_STD, b=2 * HEAD_STD, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes"]:
        return self.head(self.encoder.embed(images))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return, for timm, the layers: patches and positions, then the blocks; the last norm learns as fast as the head."""
        stem = r"^encoder\.vit\.(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)"
        return {"stem": stem, "blocks": r"^encoder\.vit\.blocks\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        """Return the weights, besides vectors, that do not decay."""
        return {f"encoder.vit.{name}" for name in self.encoder.vit.no_weight_decay()}


def trainable_copy(encoder: Encoder, drop_path: float) -> Encoder:
    """Return a copy in which everything is trained that a prediction depends on, except fixed positions.

    Its residual branches are dropped at random in training, later ones more often.
    """
    twin = copy.deepcopy(encoder)
    rates = calculate_drop_path_rates(drop_path, len(twin.vit.blocks))
    for block, rate in zip(twin.vit.blocks, rates, strict=True):
        # Blocks of some models have their branches in submodules.
        for owner in list(block.modules()):
            for name in [name for name, _ in owner.named_children() if name.startswith("drop_path")]:
                setattr(owner, name, DropPath(rate) if rate else nn.Identity())
    for name, parameter in twin.vit.named_parameters():
        # Of a frozen encoder too: only positions are fixed by design.
        parameter.requires_grad_(
            name.split(".")[0] not in UNUSED_PARTS and (name != "pos_embed" or parameter.requires_grad)
        )
    return twin


def make_optimiser(classifier: Classifier, options: FinetuneOptions) -> torch.optim.AdamW:
    """Return AdamW with one group per layer, each with its scale of the learning rate."""
    groups = param_groups_layer_decay(
        classifier, options.weight_decay, classifier.no_weight_decay(), layer_decay=options.layer_decay
    )
    # Each step sets the learning rate of each group.
    return torch.optim.AdamW(groups, lr=0.0, betas=options.betas, fused=True)


class Mixing:
    """Random erasing, then mixup or cutmix, of one batch: timm's, with random numbers from a seed."""

    def __init__(self, options: FinetuneOptions, classes: int, device: torch.device) -> None:
        self.smoothing, self.classes = options.label_smoothing, classes
        self.erase = RandomErasing(options.erasing_probability, mode="pixel", device=str(device))
        self.mixup = None
        if options.mixup or options.cutmix:
            self.mixup = Mixup(options.mixup, options.cutmix, label_smoothing=self.smoothing, num_classes=classes)

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], labels: Int[Tensor, " batch"], seed: int
    ) -> tuple[Float[Tensor, "batch 3 height width"], Float[Tensor, "batch classes"]]:
        """Return changed images, and the class probabilities that belong to them."""
        images, targets = images.clone(), mixup_target(labels, self.classes, 1.0, self.smoothing)
        device = images.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _seeded_globals(seed):
            torch.manual_seed(seed)
            if self.erase.probability:
                images = self.erase(images)
            # Pairs are blended; the last of an odd number of images stays as it is.
            even = len(images) // 2 * 2
            if self.mixup is not None and even:
                images[:even], targets[:even] = self.mixup(images[:even], labels[:even])
        return images, targets


class RandAugment:
    """timm's RandAugment with the settings of its recipes, of one image, with random numbers from a seed."""

    def __init__(self, name: str, size: tuple[int, int], mean: Sequence[float]) -> None:
        grey = tuple(min(255, round(255 * value)) for value in mean)
        bicubic = PIL.Image.Resampling.BICUBIC
        settings = {"translate_const": int(0.45 * min(size)), "img_mean": grey, "interpolation": bicubic}
        self.change = rand_augment_transform(name, settings)
        for change in self.change.ops:
            change.aug_fn = _posterize if change.aug_fn is posterize else change.aug_fn

    def __call__(self, pixels: UInt8[Tensor, "height width 3"], seed: int) -> UInt8[Tensor, "height width 3"]:
        with _seeded_globals(seed):
            return torch.from_numpy(np.array(self.change(PIL.Image.fromarray(pixels.numpy()))))


def _posterize(image: PIL.Image.Image, bits: int, **settings: Any) -> PIL.Image.Image:
    # At its greatest strength timm asks for 0 bits, which Pillow refuses.
    return posterize(image, max(1, bits), **settings)


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and numpy, which timm draws from, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class FinetuneTraining(LabelledTraining):
    """The training of a classifier that starts from a copy of an encoder."""

    def __init__(self, encoder: Encoder, train: LabelledSet, options: FinetuneOptions, conditions: Conditions) -> None:
        self.options = filled = options.filled(encoder.dim)
        ranks, classes = conditions.ranks, int(train.classes.max()) + 1
        generator = seeded_generator("cpu", conditions.seed, "head")
        twin = trainable_copy(encoder, filled.drop_path)
        self.classifier = Classifier(twin, classes, generator).to(ranks.device)
        optimiser = make_optimiser(self.classifier, filled)
        remedy = f"lower finetune.lr ({filled.lr})"
        super().__init__(self.classifier, optimiser, twin, train, filled.epochs, filled.batch_size, conditions, remedy)
        self.shared = share(self.classifier, ranks)
        self.mixing = Mixing(filled, classes, ranks.device)
        self.losses: list[float] = []
        """The losses of the last steps, at most one epoch."""

    @property
    def train_loss(self) -> float:
        """The mean loss of the last epoch."""
        return float(np.nanmean(self.losses))

    def lr(self, step: int) -> float:
        """Return the learning rate of the head: linear warm-up from 0, then a cosine, as MAE's."""
        options, steps = self.options, self.steps_per_epoch
        peak = options.lr * options.batch_size / LR_IMAGES
        return warmup_cosine(step, options.warmup_epochs * steps, self.epochs * steps, 0.0, peak, options.lowest_lr)

    def start(self, trainer: Trainer) -> None:
        self.classifier.train()

    def update(
        self, images: Float[Tensor, "batch 3 h w"], labels: Int[Tensor, " batch"], lr: float, seed: int
    ) -> Outcome:
        """Take a step, with gradients accumulated over parts of the batch; without finite values nothing is updated."""
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["lr_scale"]
        device = self.ranks.device
        # Drop path draws from the global generator.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            loss = reduce_mean(self._backward(images, labels, seed), self.ranks)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.classifier.parameters() if p.grad is not None])
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        # As a gradient scaler does: with found_inf set, the optimiser's kernel changes nothing.
        self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimiser.step()
        return torch.stack([loss, norm.to(loss), finite.to(loss)])

    def _backward(
        self, images: Float[Tensor, "batch 3 h w"], labels: Int[Tensor, " batch"], seed: int
    ) -> Float[Tensor, ""]:
        """Compute the gradients and return the loss of this process."""
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        total = torch.zeros((), device=self.ranks.device)
        at_a_time = self.speed.batch_size_per_device or len(labels)
        parts = list(zip(images.split(at_a_time), labels.split(at_a_time), strict=True))
        for number, (part, part_labels) in enumerate(parts, start=1):
            mixed, targets = self.mixing(part, part_labels, derive_seed(seed, "mixing", number))
            # Gradients are averaged over the processes once, with the last part.
            waits = isinstance(self.shared, DistributedDataParallel) and number < len(parts)
            with self.shared.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with autocast_for(self.speed.precision, self.ranks.device):
                    logits = self.shared(mixed)
                loss = F.cross_entropy(logits.float(), targets, reduction="sum") / count
                loss.backward()
            total += loss.detach()
        return total

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        self.losses = [*self.losses, *(outcome.loss for outcome in outcomes)][-self.steps_per_epoch :]

    def state(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.losses = state["losses"]

    def predict(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "heads batch classes"]:
        with autocast_for(self.speed.precision, self.ranks.device):
            return self.classifier(images).float()[None]
