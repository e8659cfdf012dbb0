"""The paper's linear protocol: heads on frozen features of augmented images, trained by SGD, all of them at once.

A held-out part of the training images chooses among the heads; the test set is scored once, and decides nothing.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from stop_mim.data.augment import Augment
from stop_mim.data.labelled import LabelledBatches, LabelledSet, hold_out
from stop_mim.data.loader import Progress
from stop_mim.errors import TrainingDiverged
from stop_mim.evaluation.curvature import inverse_curvature, precondition, sum_of_products
from stop_mim.evaluation.features import encoder_fingerprint
from stop_mim.evaluation.labelled_training import (
    LR_IMAGES,
    TOP,
    ImageViews,
    StateFile,
    accuracies,
    check_sets,
    images_at_a_time,
    labelled_batches,
    ranks_of,
)
from stop_mim.evaluation.linear_heads import Head, LinearHeads
from stop_mim.evaluation.protocols import LinearProtocol
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.checkpoint import collect_tensors, restore_tensors
from stop_mim.training.config import SpeedConfig, require, require_choices
from stop_mim.training.distributed import Ranks, reduce_mean, share
from stop_mim.training.online_probe import evaluation_mode
from stop_mim.training.schedules import cosine

# Images that tell how the features vary, for each of them.
IMAGES_A_FEATURE = 10


@dataclass(frozen=True)
class LinearSGDConfig(ImageViews):
    """How the linear heads are trained and chosen; the defaults are the protocol of ImageNet-1k."""

    epochs: int = 28
    """Passes over the training images."""
    batch_size: int = 256
    """Images an update, over all devices."""
    lrs: tuple[float, ...] = (0.01,)
    """Learning rates for a batch of 256 images, scaled linearly with the batch; every head is trained with each of them."""
    schedule: Literal["milestones", "cosine"] = "milestones"
    """milestones: the learning rate falls at some epochs; cosine: along half a cosine over all of them."""
    milestones: tuple[int, ...] = (8, 16, 24)
    """Epochs, counted from 0, at whose beginning the learning rate falls."""
    milestone_factor: float = 0.1
    """What remains of the learning rate at a milestone."""
    final_factor: float = 0.01
    """What remains of the learning rate at the end of the cosine."""
    momentum: float = 0.9
    """Nesterov momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay of weights and biases."""
    preconditioned: bool = False
    """Steps are stretched along the principal components in which the features vary little, and which plain SGD reaches
    last; the optimum stays. Learning rates are then parts of a step of Newton's."""
    layers: int = 4
    """The heads see the last layer, or the concatenation of this many; all layers if the encoder has fewer."""
    held_out_part: float = 0.05
    """Part of the training images, of every class alike, that chooses the head; the heads do not learn from it."""
    held_out_images: int = 10_000
    """The most images that are held out."""
    seed: int = 0
    """Seed of the heads, the held-out part, the order of the images and their augmentation."""

    def __post_init__(self) -> None:
        require_choices(self, "linear_sgd")
        for name in ("epochs", "layers", "held_out_images"):
            require(self, "linear_sgd", name, getattr(self, name) > 0, "give a number above zero")
        require(self, "linear_sgd", "batch_size", self.batch_size > 1, "give at least 2 images")
        rates = bool(self.lrs) and all(0 < lr < math.inf for lr in self.lrs) and len({*self.lrs}) == len(self.lrs)
        require(self, "linear_sgd", "lrs", rates, "give one or more different numbers above zero")
        falls = all(one < other for one, other in zip((0, *self.milestones), self.milestones, strict=False))
        require(self, "linear_sgd", "milestones", falls, "give epochs above zero, the earliest first")
        for name in ("milestone_factor", "final_factor"):
            require(self, "linear_sgd", name, 0 <= getattr(self, name) <= 1, "give a number from 0 to 1")
        require(self, "linear_sgd", "momentum", 0 < self.momentum < 1, "give a number between 0 and 1")
        require(self, "linear_sgd", "weight_decay", 0 <= self.weight_decay < math.inf, "give zero or a positive number")
        require(self, "linear_sgd", "held_out_part", 0 < self.held_out_part < 1, "give a number between 0 and 1")
        self.augment()


def config_for(
    protocol: LinearProtocol,
    epochs: int | None = None,
    batch_size: int = 256,
    lrs: tuple[float, ...] | None = None,
    seed: int = 0,
) -> LinearSGDConfig:
    """A data set's protocol; epochs and learning rates that are given take the place of its own."""
    final, length = protocol.cosine_final_lr, protocol.epochs if epochs is None else epochs
    scaled = [max(1, round(milestone * length / protocol.epochs)) for milestone in protocol.lr_milestones]
    return LinearSGDConfig(
        epochs=length,
        batch_size=batch_size,
        lrs=protocol.lrs if lrs is None else lrs,
        schedule="milestones" if final is None else "cosine",
        milestones=tuple(sorted({milestone for milestone in scaled if milestone < length})),
        final_factor=0.01 if final is None else final / protocol.lr,
        momentum=protocol.momentum,
        weight_decay=protocol.weight_decay,
        preconditioned=protocol.preconditioned,
        train_view=protocol.train_view,
        test_view=protocol.test_view,
        seed=seed,
    )


def lr_factor(config: LinearSGDConfig, epoch: float) -> float:
    """What remains of the learning rate after so many epochs."""
    if config.schedule == "cosine":
        return cosine(epoch / config.epochs, 1.0, config.final_factor)
    return config.milestone_factor ** bisect_right(config.milestones, epoch)


def heads_for(config: LinearSGDConfig, depth: int) -> tuple[Head, ...]:
    """The last layer and the last few, without and with BatchNorm, at every learning rate."""
    layers = sorted({1, min(config.layers, depth)})
    return tuple(Head(count, norm, lr) for count in layers for norm in (False, True) for lr in config.lrs)


def linear_sgd(
    encoder: FrozenEncoder,
    train: LabelledSet,
    test: LabelledSet,
    config: LinearSGDConfig,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    speed: SpeedConfig | None = None,
    state_file: Path | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields accuracies in percent: of every head, then of those that the held-out images choose: of each kind, and of all.

    With a `state_file` every epoch is saved there, and a call with the same arguments goes on from it. Of `speed`, its
    precision, batch_size_per_device (images in the encoder at a time), loader and workers count.
    """
    check_sets(train, test)
    ranks = ranks or ranks_of(encoder)
    run = LinearRun(encoder, train, config, ranks, speed or SpeedConfig())
    return _results(run, test, StateFile(state_file, run.identity(), ranks), progress)


def _results(
    run: "LinearRun", test: LabelledSet, state: "StateFile", progress: Progress | None
) -> Iterator[tuple[str, float]]:
    with evaluation_mode(run.encoder):
        run.train(state, progress)
        held_out, tested = run.score(run.held_out).tolist(), run.score(test).tolist()
    heads, several = run.heads.heads, len(run.config.lrs) > 1

    def scores(name: str, number: int) -> Iterator[tuple[str, float]]:
        yield f"{name}/held_out_top1", held_out[number][0]
        yield from ((f"{name}/top{top}", value) for top, value in zip(TOP, tested[number], strict=True))

    def best(numbers: Iterable[int]) -> int:
        return max(numbers, key=lambda number: held_out[number][0])

    for number, head in enumerate(heads):
        yield from scores(f"linear_sgd/{head.name(several)}", number)
    for name in dict.fromkeys(head.name() for head in heads) if several else ():
        chosen = best(number for number, head in enumerate(heads) if head.name() == name)
        yield f"linear_sgd/{name}/lr", heads[chosen].lr
        yield from scores(f"linear_sgd/{name}", chosen)
    chosen = best(range(len(heads)))
    yield "linear_sgd/layers", float(heads[chosen].layers)
    yield "linear_sgd/batch_norm", float(heads[chosen].batch_norm)
    yield "linear_sgd/lr", heads[chosen].lr
    yield from scores("linear_sgd", chosen)


class LinearRun:
    """The heads of an encoder, and all that their training needs."""

    def __init__(
        self, encoder: FrozenEncoder, train: LabelledSet, config: LinearSGDConfig, ranks: Ranks, speed: SpeedConfig
    ) -> None:
        self.encoder, self.config, self.ranks, self.speed = encoder, config, ranks, speed
        encoder.to(ranks.device)
        self.used, self.held_out = hold_out(train, config.held_out_part, config.held_out_images, config.seed)
        heads, classes = heads_for(config, encoder.depth), int(train.classes.max()) + 1
        self.heads = LinearHeads(heads, encoder.dim, classes, ranks, config.seed).to(ranks.device)
        scale = config.batch_size / LR_IMAGES
        groups = [
            {"params": [*linear.parameters()], "peak_lr": head.lr * scale}
            for head, linear in zip(heads, self.heads.linears, strict=True)
        ]
        # Where steps are preconditioned, weight decay is a part of what they are made from.
        weight_decay = 0.0 if config.preconditioned else config.weight_decay
        self.optimiser = torch.optim.SGD(
            groups, lr=0.0, momentum=config.momentum, weight_decay=weight_decay, nesterov=True
        )
        self.moments: Tensor | None = None
        self.inverses: dict[tuple[int, bool], Tensor] = {}
        self.model = share(self.heads, ranks)

    def identity(self) -> dict[str, Any]:
        """What a saved state must agree with."""
        return {
            "evaluation": "linear_sgd",
            "config": asdict(self.config),
            "encoder": encoder_fingerprint(self.encoder),
            "image_size": self.encoder.image_size,
            "images": self.used.fingerprint(),
        }

    def train(self, state: "StateFile", progress: Progress | None) -> None:
        """Every epoch from where the state is to the last."""
        config, first = self.config, 0
        saved = state.read()
        if saved is not None:
            restore_tensors(saved, self.heads, self.optimiser)
            first = saved.step
            self.moments = saved.tensors.get("moments")
        if first == config.epochs:
            return
        batches = self.batches()
        if config.preconditioned:
            self.moments = self._moments(batches) if self.moments is None else self.moments.to(self.ranks.device)
            self.inverses = self._inverse_curvatures(self.moments)
        kept = {} if self.moments is None else {"moments": self.moments}
        self.heads.train()
        if self.moments is not None:
            self.heads.norm.fix(self.moments)
        for epoch in range(first, config.epochs):
            self._train_epoch(epoch, batches, progress)
            state.save(epoch + 1, collect_tensors(self.heads, self.optimiser) | kept)

    def batches(self) -> LabelledBatches:
        """What the heads learn from, an epoch at a time."""
        config = self.config
        augment = Augment(config.augment(), self.encoder.image_size, self.encoder.mean, self.encoder.std)
        crop = config.train_view == "random_resized_crop"
        return labelled_batches(self.used, augment, config.batch_size, config.seed, crop, self.ranks, self.speed)

    def _moments(self, batches: LabelledBatches) -> Float64[Tensor, "dim_and_one dim_and_one"]:
        """Means of the products of the features, over as many training images as tell them."""
        width = self.encoder.dim * max(head.layers for head in self.heads.heads)
        total = torch.zeros(width + 1, width + 1, dtype=torch.float64, device=self.ranks.device)
        needed = math.ceil(IMAGES_A_FEATURE * width / self.config.batch_size)
        with closing(batches.epoch(0)) as labelled:
            for images, _ in islice(labelled, needed):
                total += sum_of_products(self.features(images))
        total = reduce_mean(total, self.ranks)
        moments = total / total[-1, -1]
        if not torch.isfinite(moments).all():
            raise TrainingDiverged("The features are not finite: look for values in the encoder that are not finite.")
        return moments

    def _inverse_curvatures(self, moments: Tensor) -> dict[tuple[int, bool], Tensor]:
        classes, decay = self.heads.linears[0].out_features, self.config.weight_decay
        return {
            (layers, norm): inverse_curvature(moments, layers * self.encoder.dim, norm, classes, decay)
            for layers, norm in {(head.layers, head.batch_norm) for head in self.heads.heads}
        }

    def _train_epoch(self, epoch: int, batches: LabelledBatches, progress: Progress | None) -> None:
        total = torch.zeros(len(self.heads.heads), device=self.ranks.device)
        with closing(batches.epoch(epoch)) as labelled:
            for step, (images, labels) in enumerate(labelled):
                factor = lr_factor(self.config, epoch + step / len(batches))
                for group in self.optimiser.param_groups:
                    group["lr"] = group["peak_lr"] * factor
                # A batch that lost its images to bad files has no statistics.
                if self.ranks.world_size > 1 or len(labels) > 1:
                    total += self._step(images, labels)
                if progress is not None:
                    progress(epoch * len(batches) + step + 1, self.config.epochs * len(batches))
        if not torch.isfinite(reduce_mean(total, self.ranks)).any():
            raise TrainingDiverged(
                f"No linear head had a finite loss in epoch {epoch + 1}: lower linear_sgd.lrs ({self.config.lrs}), or look "
                "for values in the encoder that are not finite."
            )

    def _step(
        self, images: Float[Tensor, "batch 3 height width"], labels: Int[Tensor, " batch"]
    ) -> Float[Tensor, " heads"]:
        features = self.features(images)
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        losses = self.model(features, labels) / count.clamp(min=1 / self.ranks.world_size)
        losses.sum().backward()
        if self.inverses:
            for head, linear in zip(self.heads.heads, self.heads.linears, strict=True):
                precondition(linear, self.inverses[head.layers, head.batch_norm], self.config.weight_decay)
        self.optimiser.step()
        return losses.detach()

    def features(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch layers_times_dim"]:
        """Frozen features of the last layers in full precision, of some images at a time."""
        layers = max(head.layers for head in self.heads.heads)
        if not len(images):
            return torch.zeros(0, layers * self.encoder.dim, device=images.device)
        # Not inference_mode: what it makes cannot be kept for the heads' gradients.
        with torch.no_grad(), autocast_for(self.speed.precision, self.ranks.device):
            parts = [self.encoder.embed(part, layers) for part in images.split(images_at_a_time(self.speed))]
        return torch.cat([part.float() for part in parts])

    def score(self, data: LabelledSet) -> Float[Tensor, "heads top"]:
        """Accuracies of every head in percent."""
        self.heads.eval()

        def predict(images: Tensor) -> Tensor:
            return self.heads.logits(self.features(images))

        heads = len(self.heads.heads)
        return accuracies(predict, heads, data, self.encoder, self.config.test_view, self.ranks, self.speed)
