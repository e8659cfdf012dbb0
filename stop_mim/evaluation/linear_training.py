"""The training of linear heads on frozen features of augmented images, by SGD, for the task linear-sgd."""

import math
from bisect import bisect_right
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from stop_mim.data.labelled import LabelledSet, hold_out
from stop_mim.errors import TrainingDiverged
from stop_mim.evaluation.features import IMAGES_AT_A_TIME
from stop_mim.evaluation.labelled_training import LR_IMAGES, Conditions, LabelledTraining
from stop_mim.evaluation.linear_heads import Head, LinearHeads, inverse_curvature, precondition, sum_of_products
from stop_mim.evaluation.protocols import Protocol
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.distributed import reduce_mean, share
from stop_mim.training.schedules import cosine
from stop_mim.training.step import Outcome
from stop_mim.training.trainer import Trainer

MOMENTUM = 0.9
LAYERS = 4
# Images, for each feature, that the second moments of the features are estimated from.
IMAGES_PER_FEATURE = 10


def held_out_images(images: int) -> int:
    """Return how many training images choose among the heads.

    A fifth, up to 2,500 or, of more than 50,000, a twentieth, up to 10,000; but at least 200 where that leaves half.
    """
    fifth, twentieth, least = min(images / 5, 2_500), min(images / 20, 10_000), min(200, images / 2)
    return round(max(fifth, twentieth, least))


def lr_factor(protocol: Protocol, epoch: float) -> float:
    """Return the learning rate after so many epochs, as a fraction of the first one."""
    if protocol.final_factor is not None:
        reached = math.floor(epoch) if protocol.by_epoch else epoch
        return cosine(reached / protocol.epochs, 1.0, protocol.final_factor)
    return 0.1 ** bisect_right(protocol.milestones, epoch)


def heads_for(protocol: Protocol, depth: int) -> list[Head]:
    """Return heads of the last layer and of the last four, without and with BatchNorm, at every learning rate."""
    layers = sorted({1, min(LAYERS, depth)})
    return [Head(count, norm, lr) for count in layers for norm in (False, True) for lr in protocol.lrs]


class LinearTraining(LabelledTraining):
    """The training of the heads of an encoder."""

    # BatchNorm needs two images.
    least_images = 2

    def __init__(self, encoder: FrozenEncoder, train: LabelledSet, batch_size: int, conditions: Conditions) -> None:
        self.protocol = protocol = conditions.protocol
        ranks = conditions.ranks
        encoder.to(ranks.device)
        used, self.held_out = hold_out(train, 1.0, held_out_images(len(train)), conditions.seed)
        heads, classes = heads_for(protocol, encoder.depth), int(train.classes.max()) + 1
        affine = not protocol.preconditioned
        self.heads = LinearHeads(heads, encoder.dim, classes, ranks, conditions.seed, affine).to(ranks.device)
        # Preconditioned steps include weight decay; BatchNorm has none.
        decays = (0.0 if protocol.preconditioned else protocol.weight_decay, 0.0)
        groups = [
            {"params": [*part.parameters()], "peak_lr": head.lr * batch_size / LR_IMAGES, "weight_decay": decay}
            for parts, decay in zip((self.heads.linears, self.heads.affines), decays, strict=True)
            for head, part in zip(heads, parts, strict=True)
        ]
        groups = [group for group in groups if group["params"]]
        optimiser = torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, nesterov=True)
        remedy = f"lower linear_sgd.lrs ({protocol.lrs}), or check the encoder's weights"
        super().__init__(self.heads, optimiser, encoder, used, protocol.epochs, batch_size, conditions, remedy)
        self.shared = share(self.heads, ranks)
        self.moments: Tensor | None = None
        self.inverses: dict[tuple[int, bool], Tensor] = {}

    def start(self, trainer: Trainer) -> None:
        self.heads.train()
        if not self.protocol.preconditioned:
            return
        if self.moments is None:
            self.moments = self._moments()
        classes, decay = self.heads.linears[0].out_features, self.protocol.weight_decay
        self.inverses = {
            (layers, norm): inverse_curvature(self.moments, layers * self.encoder.dim, norm, classes, decay)
            for layers, norm in {(head.layers, head.batch_norm) for head in self.heads.heads}
        }
        self.heads.norm.fix(self.moments)

    def _moments(self) -> Float64[Tensor, "dim_and_one dim_and_one"]:
        """Return the second moments of the features, from as many training images as they need."""
        width = self.encoder.dim * self.heads.layers
        total = torch.zeros(width + 1, width + 1, dtype=torch.float64, device=self.ranks.device)
        needed = math.ceil(IMAGES_PER_FEATURE * width / self.batch_size)
        with closing(self.batches(0)) as batches:
            for batch in islice(batches, min(needed, self.steps_per_epoch)):
                if len(batch.images):
                    total += sum_of_products(self.features(batch.images))
        total = reduce_mean(total, self.ranks)
        moments = total / total[-1, -1]
        if not torch.isfinite(moments).all():
            raise TrainingDiverged("The features are not finite: check the encoder's weights.")
        return moments

    def lr(self, step: int) -> float:
        """Return the factor of all learning rates."""
        return lr_factor(self.protocol, step / self.steps_per_epoch)

    def update(
        self, images: Float[Tensor, "batch 3 h w"], labels: Int[Tensor, " batch"], lr: float, seed: int
    ) -> Outcome:
        """Take a step of all heads; it counts as one if at least one of them has a finite loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak_lr"] * lr
        features = self.features(images)
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        losses = self.shared(features, labels) / count
        losses.sum().backward()
        if self.inverses:
            for head, linear in zip(self.heads.heads, self.heads.linears, strict=True):
                precondition(linear, self.inverses[head.layers, head.batch_norm], self.protocol.weight_decay)
        self.optimiser.step()
        reduced = reduce_mean(losses.detach(), self.ranks)
        finite = torch.isfinite(reduced)
        mean = reduced.where(finite, torch.nan).nanmean()
        return torch.stack([mean, torch.zeros_like(mean), finite.any().to(mean)])

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments, which a resumed training does not estimate again."""
        return {} if self.moments is None else {"moments": self.moments}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if "moments" in tensors:
            self.moments = tensors["moments"].to(self.ranks.device)

    def features(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch layers_times_dim"]:
        """Return frozen features of the last layers in full precision."""
        at_a_time = self.speed.batch_size_per_device or IMAGES_AT_A_TIME
        # Not inference_mode: its tensors cannot be used for the heads' gradients.
        with torch.no_grad(), autocast_for(self.speed.precision, self.ranks.device):
            parts = [self.encoder.embed(part, self.heads.layers) for part in images.split(at_a_time)]
        return torch.cat([part.float() for part in parts])

    def predict(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "heads batch classes"]:
        return self.heads.logits(self.features(images))
