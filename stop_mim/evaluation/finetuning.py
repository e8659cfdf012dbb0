"""Fine-tuning of a copy of an encoder with a linear head: layer-wise learning rates, mixup, cutmix, RandAugment."""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

from stop_mim.data.labelled import LabelledSet
from stop_mim.evaluation.labelled_training import LR_IMAGES, Conditions, LabelledTraining
from stop_mim.evaluation.tasks.finetune import FinetuneOptions
from stop_mim.models.encoder import Encoder, Images
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.distributed import distribute, reduce_mean
from stop_mim.training.schedules import warmup_cosine
from stop_mim.training.step import Outcome, StepOutcome, gradient_norm, step_if_finite, synchronised
from stop_mim.training.trainer import Trainer

HEAD_STD = 2e-5
# Parts of timm's models after the pooled features, which a prediction does not depend on.
UNUSED_PARTS = ("attn_pool", "head", "head_dist")


class Classifier(nn.Module):
    """An encoder and a linear head on its average-pooled normed patch tokens."""

    def __init__(self, encoder: Encoder, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.encoder = encoder
        # Without torch's initialisation, which would advance the global generator.
        self.head = nn.utils.skip_init(nn.Linear, encoder.dim, classes)
        # Almost zero: the first updates change mainly the head, whose weights scale the gradients of the encoder.
        nn.init.trunc_normal_(self.head.weight, std=HEAD_STD, a=-2 * HEAD_STD, b=2 * HEAD_STD, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Images) -> Float[Tensor, "batch classes"]:
        return self.head(self.encoder.embed(images))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return, for timm, the layers: patches and positions, then the blocks; the last norm learns as fast as the head."""
        stem = r"^encoder\.vit\.(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)"
        return {"stem": stem, "blocks": r"^encoder\.vit\.blocks\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        """Return the weights, besides vectors, that do not decay."""
        return {f"encoder.vit.{name}" for name in self.encoder.vit.no_weight_decay()}


def trainable_copy(encoder: Encoder, drop_path: float) -> Encoder:
    """Return a copy with drop path, in which all weights that a prediction depends on are trained, except fixed positions."""
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
        self, images: Images, labels: Int[Tensor, " batch"], seed: int
    ) -> tuple[Images, Float[Tensor, "batch classes"]]:
        """Return the mixed images and their class probabilities."""
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

    def __init__(self, encoder: Encoder, train: LabelledSet, options: Any, conditions: Conditions) -> None:
        self.options = options
        ranks, classes = conditions.ranks, int(train.classes.max()) + 1
        generator = seeded_generator("cpu", conditions.seed, "head")
        twin = trainable_copy(encoder, options.drop_path)
        self.classifier = Classifier(twin, classes, generator).to(ranks.device)
        optimiser = make_optimiser(self.classifier, options)
        remedy = f"lower {options.GROUP}.lr ({options.lr})"
        super().__init__(
            self.classifier, optimiser, twin, train, options.epochs, options.batch_size, conditions, remedy
        )
        self.distributed = distribute(self.classifier, ranks)
        self.mixing = Mixing(options, classes, ranks.device)
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

    def update(self, images: Images, labels: Int[Tensor, " batch"], lr: float, seed: int) -> Outcome:
        """Take a step; if loss or gradient is not finite, update nothing."""
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["lr_scale"]
        device = self.ranks.device
        # Drop path draws from the global generator.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            loss = reduce_mean(self._backward(images, labels, seed), self.ranks)
        norm = gradient_norm(self.classifier)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        step_if_finite(self.optimiser, finite)
        return torch.stack([loss, norm.to(loss), finite.to(loss)])

    def _backward(self, images: Images, labels: Int[Tensor, " batch"], seed: int) -> Float[Tensor, ""]:
        """Compute the gradients, accumulated over parts of the batch; return the loss of this process."""
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        total = torch.zeros((), device=self.ranks.device)
        at_a_time = self.speed.batch_size_per_device or len(labels)
        parts = list(zip(images.split(at_a_time), labels.split(at_a_time), strict=True))
        for number, (part, part_labels) in enumerate(parts, start=1):
            mixed, targets = self.mixing(part, part_labels, derive_seed(seed, "mixing", number))
            with synchronised(self.distributed, is_last=number == len(parts)):
                with autocast_for(self.speed.precision, self.ranks.device):
                    logits = self.distributed(mixed)
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

    def predict(self, images: Images) -> Float[Tensor, "heads batch classes"]:
        with autocast_for(self.speed.precision, self.ranks.device):
            return self.classifier(images).float()[None]
