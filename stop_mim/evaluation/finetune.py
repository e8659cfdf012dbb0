"""End-to-end fine-tuning: a copy of the encoder and a linear head, trained together on labelled images.

The test set is scored once, at the end: nothing is chosen by it.
"""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.layers import DropPath, calculate_drop_path_rates
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stop_mim.data.augment import Augment
from stop_mim.data.labelled import LabelledBatches, LabelledSet, hold_out
from stop_mim.data.loader import Progress
from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.evaluation.features import encoder_fingerprint
from stop_mim.evaluation.labelled_training import (
    LR_IMAGES,
    TOP,
    ImageViews,
    StateFile,
    accuracies,
    check_sets,
    labelled_batches,
    ranks_of,
)
from stop_mim.models.encoder import Encoder, FrozenEncoder
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.checkpoint import collect_tensors, restore_tensors
from stop_mim.training.config import SpeedConfig, require, require_choices
from stop_mim.training.distributed import Ranks, any_rank, reduce_mean, share
from stop_mim.training.schedules import warmup_cosine

HEAD_STD = 2e-5
# Parts of timm's models that come after the normed patch tokens, and so learn nothing here.
UNUSED_PARTS = ("fc_norm", "attn_pool", "head", "head_dist")


@dataclass(frozen=True)
class FinetuneConfig(ImageViews):
    """How an encoder is fine-tuned; the defaults are usual for ViT-B and all of ImageNet-1k, but for RandAugment."""

    GROUP: ClassVar[str] = "finetune"
    epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 1024
    """Images an update, over all devices and accumulated batches."""
    lr: float = 5e-4
    """Learning rate of the head at its peak for a batch of 256 images, scaled linearly with the batch."""
    lowest_lr: float = 1e-6
    """Learning rate of the head at the first and at the last step."""
    warmup_epochs: float = 5.0
    """Epochs from the start to the peak of the learning rate."""
    layer_decay: float = 0.65
    """Factor of the learning rate from one layer to the one below it."""
    weight_decay: float = 0.05
    """AdamW's weight decay; biases, norms, positions and class tokens have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two averaging factors."""
    clip_gradient_norm: float | None = None
    """Largest norm of the gradient; not given: no limit."""
    drop_path: float = 0.1
    """Chance that a residual branch is left out, for the last layer; earlier ones have less."""
    mixup: float = 0.8
    """Alpha of mixup, which blends pairs of images; 0: none."""
    cutmix: float = 1.0
    """Alpha of cutmix, which pastes a box of one image into another; 0: none. With both, each batch gets one of them."""
    label_smoothing: float = 0.1
    """Part of the target that is spread over all classes."""
    erasing_probability: float = 0.25
    """Chance that a box of an image is replaced by noise."""
    held_out_part: float = 0.0
    """Part of the training images that chooses among the epochs; 0: all of them are learned from, the last epoch is taken."""
    held_out_images: int = 10_000
    """The most images that are held out."""
    seed: int = 0
    """Seed of the head, the order of the images, their augmentation and drop path."""

    def __post_init__(self) -> None:
        group = self.GROUP
        require_choices(self, group)
        for name in ("epochs", "batch_size", "lr", "held_out_images"):
            require(self, group, name, 0 < getattr(self, name) < math.inf, "give a number above zero")
        for name in ("lowest_lr", "warmup_epochs", "weight_decay", "mixup", "cutmix"):
            require(self, group, name, 0 <= getattr(self, name) < math.inf, "give zero or a positive number")
        for name in ("drop_path", "label_smoothing", "held_out_part"):
            require(self, group, name, 0 <= getattr(self, name) < 1, "give a number from 0 to below 1")
        require(self, group, "erasing_probability", 0 <= self.erasing_probability <= 1, "give a number from 0 to 1")
        require(self, group, "layer_decay", 0 < self.layer_decay <= 1, "give a number above 0, at most 1")
        require(self, group, "betas", all(0 <= beta < 1 for beta in self.betas), "give numbers from 0 to below 1")
        clip = self.clip_gradient_norm
        require(self, group, "clip_gradient_norm", clip is None or clip > 0, "give a number above zero")
        require(
            self, group, "warmup_epochs", self.warmup_epochs <= self.epochs, f"give at most the {self.epochs} epochs"
        )
        self.augment()


@dataclass(frozen=True)
class LowShotFinetuneConfig(FinetuneConfig):
    """For a few images a class, such as 1% of ImageNet: as usual, more epochs, a lower learning rate and no mixed images."""

    GROUP: ClassVar[str] = "finetune_low_shot"
    epochs: int = 200
    batch_size: int = 256
    lr: float = 1e-4
    warmup_epochs: float = 10.0
    drop_path: float = 0.2
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing_probability: float = 0.0
    crop_scale: tuple[float, float] = (0.3, 1.0)


class Classifier(nn.Module):
    """An encoder and a linear head on its average-pooled normed patch tokens."""

    def __init__(self, encoder: Encoder, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.encoder = encoder
        # Without the library's own initial weights, which would move the global generator.
        self.head = nn.utils.skip_init(nn.Linear, encoder.dim, classes)
        # Almost zero: the first updates change the head alone, before they reach into the encoder.
        nn.init.trunc_normal_(self.head.weight, std=HEAD_STD, a=-2 * HEAD_STD, b=2 * HEAD_STD, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes"]:
        """Scores of the classes."""
        return self.head(self.encoder.embed(images))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The layers of each weight, for timm: patches and positions, the blocks (the last with the norm), the head."""
        stem = r"^encoder\.vit\.(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)"
        return {"stem": stem, "blocks": [(r"^encoder\.vit\.blocks\.(\d+)", None), (r"^encoder\.vit\.norm", (99999,))]}

    def no_weight_decay(self) -> set[str]:
        """The weights, besides vectors, that do not decay."""
        return {f"encoder.vit.{name}" for name in self.encoder.vit.no_weight_decay()}


def with_drop_path(encoder: Encoder, rate: float) -> Encoder:
    """A copy of the encoder whose residual branches are left out at random in training, the later the more often."""
    twin = copy.deepcopy(encoder)
    rates = calculate_drop_path_rates(rate, len(twin.vit.blocks))
    for block, block_rate in zip(twin.vit.blocks, rates, strict=True):
        # Blocks of some models have their branches in submodules.
        for owner in list(block.modules()):
            for name in [name for name, _ in owner.named_children() if name.startswith("drop_path")]:
                setattr(owner, name, DropPath(block_rate) if block_rate else nn.Identity())
    return twin


def trainable_copy(encoder: FrozenEncoder, drop_path: float) -> Encoder:
    """A copy in which everything learns that a prediction depends on, except for positions that are fixed."""
    if not isinstance(encoder, Encoder):
        raise InputError(
            f"The encoder is a {type(encoder).__name__}: only timm's Vision Transformers can be fine-tuned; use a linear probe."
        )
    twin = with_drop_path(encoder, drop_path)
    for name, parameter in twin.vit.named_parameters():
        # Of a frozen encoder too: only positions are ever fixed by their nature.
        parameter.requires_grad_(
            name.split(".")[0] not in UNUSED_PARTS and (name != "pos_embed" or parameter.requires_grad)
        )
    return twin


def make_optimiser(classifier: Classifier, config: FinetuneConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW in groups by layer, each with the part of the learning rate that is its own."""
    groups = param_groups_layer_decay(
        classifier, config.weight_decay, classifier.no_weight_decay(), layer_decay=config.layer_decay
    )
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=device.type == "cuda")


class Mixing:
    """Random erasing, then mixup or cutmix, of one batch: timm's, whose random numbers are functions of a seed here."""

    def __init__(self, config: FinetuneConfig, classes: int, device: torch.device) -> None:
        self.smoothing, self.classes = config.label_smoothing, classes
        self.erase = RandomErasing(config.erasing_probability, mode="pixel", device=str(device))
        self.mixup = None
        if config.mixup or config.cutmix:
            self.mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], labels: Int[Tensor, " batch"], seed: int
    ) -> tuple[Float[Tensor, "batch 3 height width"], Float[Tensor, "batch classes"]]:
        """Changed images, and the probabilities of the classes that belong to them."""
        images, targets = images.clone(), mixup_target(labels, self.classes, 1.0, self.smoothing)
        with _seeded_globals(seed, images.device):
            if self.erase.probability:
                images = self.erase(images)
            # Pairs are blended; the last of an odd number of images stays as it is.
            even = len(images) // 2 * 2
            if self.mixup is not None and even:
                images[:even], targets[:even] = self.mixup(images[:even], labels[:even])
        return images, targets


@contextmanager
def _seeded_globals(seed: int, device: torch.device) -> Iterator[None]:
    """timm draws from the global generators of Python, numpy and torch: they are put back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def finetune(
    encoder: FrozenEncoder,
    train: LabelledSet,
    test: LabelledSet,
    config: FinetuneConfig,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    speed: SpeedConfig | None = None,
    state_file: Path | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields the test accuracies in percent and the training loss of the last epoch; the given encoder is not changed.

    With a `state_file` every epoch is saved there, and a call with the same arguments goes on from it. Of `speed`, its
    precision, batch_size_per_device (gradients are accumulated up to the batch), loader and workers count.
    """
    check_sets(train, test)
    ranks = ranks or ranks_of(encoder)
    run = FinetuneRun(encoder, train, config, ranks, speed or SpeedConfig())
    return _results(run, test, StateFile(state_file, run.identity, ranks), progress)


def _results(
    run: "FinetuneRun", test: LabelledSet, state: StateFile, progress: Progress | None
) -> Iterator[tuple[str, float]]:
    run.train(state, progress)
    for top, value in zip(TOP, run.score(test), strict=True):
        yield f"finetune/top{top}", value
    yield "finetune/train_loss", run.train_loss
    if run.held_out is not None:
        yield "finetune/held_out_top1", run.best_top1
        yield "finetune/epoch", float(run.best_epoch)


class FinetuneRun:
    """A classifier that starts from an encoder, and all that its training needs."""

    def __init__(
        self, encoder: FrozenEncoder, train: LabelledSet, config: FinetuneConfig, ranks: Ranks, speed: SpeedConfig
    ) -> None:
        self.config, self.ranks, self.speed = config, ranks, speed
        self.used, self.held_out = train, None
        if config.held_out_part:
            self.used, self.held_out = hold_out(train, config.held_out_part, config.held_out_images, config.seed)
        classes = int(train.classes.max()) + 1
        generator = seeded_generator("cpu", config.seed, "head")
        twin = trainable_copy(encoder, config.drop_path)
        self.identity = {
            "evaluation": "finetune",
            "config": asdict(config),
            "encoder": encoder_fingerprint(encoder),
            "image_size": encoder.image_size,
            "images": self.used.fingerprint(),
        }
        self.classifier = Classifier(twin, classes, generator).to(ranks.device)
        self.optimiser = make_optimiser(self.classifier, config, ranks.device)
        self.model = share(self.classifier, ranks)
        self.mixing = Mixing(config, classes, ranks.device)
        self.train_loss, self.best_top1, self.best_epoch = math.nan, -1.0, 0
        self.best: dict[str, Tensor] = {}

    def train(self, state: StateFile, progress: Progress | None) -> None:
        """Every epoch from where the state is to the last, then the weights of the chosen epoch."""
        config, first = self.config, self._restore(state)
        if first < config.epochs:
            twin = self.classifier.encoder
            augment = Augment(config.augment(), twin.image_size, twin.mean, twin.std)
            crop = config.train_view == "random_resized_crop"
            batches = labelled_batches(self.used, augment, config.batch_size, config.seed, crop, self.ranks, self.speed)
            for epoch in range(first, config.epochs):
                self._train_epoch(epoch, batches, progress)
                self._choose(epoch + 1)
                self._save(state, epoch + 1)
        if self.best:
            self.classifier.load_state_dict(self.best)

    def _restore(self, state: StateFile) -> int:
        saved = state.read()
        if saved is None:
            return 0
        restore_tensors(saved, self.classifier, self.optimiser)
        self.best = {name.removeprefix("best."): t for name, t in saved.tensors.items() if name.startswith("best.")}
        self.train_loss, self.best_top1, self.best_epoch = (
            saved.state[name] for name in ("train_loss", "best_top1", "best_epoch")
        )
        return saved.step

    def _save(self, state: StateFile, epochs: int) -> None:
        best = {f"best.{name}": tensor for name, tensor in self.best.items()}
        tensors = collect_tensors(self.classifier, self.optimiser) | best
        state.save(epochs, tensors, train_loss=self.train_loss, best_top1=self.best_top1, best_epoch=self.best_epoch)

    def _choose(self, epochs: int) -> None:
        if self.held_out is None:
            return
        top1 = self.score(self.held_out)[0]
        if top1 > self.best_top1:
            self.best_top1, self.best_epoch = top1, epochs
            self.best = {name: t.detach().cpu().clone() for name, t in self.classifier.state_dict().items()}

    def _train_epoch(self, epoch: int, batches: LabelledBatches, progress: Progress | None) -> None:
        config, losses = self.config, []
        self.classifier.train()
        cuda = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        with closing(batches.epoch(epoch)) as labelled:
            for step, (images, labels) in enumerate(labelled, start=epoch * len(batches)):
                self._set_lr(step, len(batches))
                # A batch may have lost all its images to bad files, and the processes must take their steps together.
                if not any_rank(not len(labels), self.ranks):
                    # Drop path draws from the global generator.
                    with torch.random.fork_rng(cuda):
                        torch.manual_seed(derive_seed(config.seed, "layers", step, self.ranks.rank))
                        losses.append(self._step(step, images, labels))
                if progress is not None:
                    progress(step + 1, config.epochs * len(batches))
        self.train_loss = sum(losses) / max(len(losses), 1)

    def _set_lr(self, step: int, steps_per_epoch: int) -> None:
        config = self.config
        peak, lowest = config.lr * config.batch_size / LR_IMAGES, config.lowest_lr
        last = max(config.epochs * steps_per_epoch - 1, 1)
        lr = warmup_cosine(step, config.warmup_epochs * steps_per_epoch, last, lowest, peak, lowest)
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def _step(self, step: int, images: Float[Tensor, "batch 3 h w"], labels: Int[Tensor, " batch"]) -> float:
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        total = torch.zeros((), device=self.ranks.device)
        at_a_time = self.speed.batch_size_per_device or len(labels)
        parts = list(zip(images.split(at_a_time), labels.split(at_a_time), strict=True))
        for number, (part, part_labels) in enumerate(parts, start=1):
            seed = derive_seed(self.config.seed, "mixing", step, number, self.ranks.rank)
            mixed, targets = self.mixing(part, part_labels, seed)
            # Gradients are averaged over the processes once, with the last part.
            waits = isinstance(self.model, DistributedDataParallel) and number < len(parts)
            with self.model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with autocast_for(self.speed.precision, self.ranks.device):
                    logits = self.model(mixed)
                loss = F.cross_entropy(logits.float(), targets, reduction="sum") / count
                loss.backward()
            total += loss.detach()
        return self._update(step, reduce_mean(total, self.ranks))

    def _update(self, step: int, loss: Float[Tensor, ""]) -> float:
        parameters = list(self.classifier.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise TrainingDiverged(
                f"The loss of fine-tuning or its gradient is not finite in step {step + 1} ({loss.item()}): lower finetune.lr "
                f"({self.config.lr}) or set finetune.clip_gradient_norm."
            )
        if self.config.clip_gradient_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_gradient_norm, norm)
        self.optimiser.step()
        return loss.item()

    def score(self, data: LabelledSet) -> list[float]:
        """Accuracies in percent, of the first and the first five classes."""
        self.classifier.eval()

        def predict(images: Tensor) -> Tensor:
            with autocast_for(self.speed.precision, self.ranks.device):
                return self.classifier(images).float()[None]

        encoder = self.classifier.encoder
        return accuracies(predict, 1, data, encoder, self.config.test_view, self.ranks, self.speed)[0].tolist()
