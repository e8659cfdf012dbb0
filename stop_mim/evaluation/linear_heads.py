"""Linear classifiers of frozen features, trained side by side by SGD on augmented images, for the task linear-sgd.

Features of a network are correlated: they vary little along most principal components, and plain SGD, whose learning
rate is limited by the strongest component, hardly moves there. Preconditioned by the curvature, it moves equally fast.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from stop_mim.data.labelled import LabelledSet, hold_out
from stop_mim.errors import TrainingDiverged
from stop_mim.evaluation.features import IMAGES_AT_A_TIME
from stop_mim.evaluation.labelled_training import LR_IMAGES, Conditions, LabelledTraining
from stop_mim.evaluation.protocols import Protocol
from stop_mim.models.encoder import FrozenEncoder, Images
from stop_mim.seeds import seeded_generator
from stop_mim.training.acceleration import autocast_for
from stop_mim.training.distributed import Ranks, distribute, reduce_mean
from stop_mim.training.schedules import cosine
from stop_mim.training.step import Outcome
from stop_mim.training.trainer import Trainer

MOMENTUM = 0.9
LAYERS = 4
# Images, for each feature, that the second moments of the features are estimated from.
IMAGES_PER_FEATURE = 10
# A fraction of the mean of all variances: it bounds the steps along components without variance.
DAMPING = 1e-4
BATCH_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Head:
    """The input of one linear head, and its learning rate."""

    layers: int
    batch_norm: bool
    lr: float


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d without scale and shift, with the statistics of the images of all processes.

    Its inputs are frozen features, so that no gradients pass between processes.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, ranks: Ranks) -> None:
        super().__init__(features, affine=False)
        self.ranks = ranks

    def fix(self, moments: Float64[Tensor, "dim_and_one dim_and_one"]) -> None:
        """Standardise by these second moments from now on, in training too.

        The statistics of one batch are off by some percent. Where features are correlated, that is more than they vary
        along most principal components.
        """
        mean = moments[-1, :-1]
        self.running_mean.copy_(mean)
        self.running_var.copy_(moments.diagonal()[:-1] - mean.square())
        self.eval()

    def forward(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Standardise features: by the batch in training, else by the running statistics."""
        if not self.training or self.ranks.world_size == 1:
            return super().forward(features)
        count = reduce_mean(features.new_full((), len(features)), self.ranks)
        mean = reduce_mean(features.sum(0), self.ranks) / count
        variance = reduce_mean((features - mean).square().sum(0), self.ranks) / count
        total = count * self.ranks.world_size
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * total / (total - 1), self.momentum)
        self.num_batches_tracked.add_(1)
        return (features - mean) * (variance + self.eps).rsqrt()


class ScaleAndShift(nn.Module):
    """The parameters of a BatchNorm, after its standardisation."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        return torch.addcmul(self.bias, features, self.weight)


class LinearHeads(nn.Module):
    """Linear classifiers side by side; those with BatchNorm share its statistics.

    Args:
        affine: each BatchNorm has a scale and a shift, as VISSL's, which are trained with the head.
    """

    def __init__(self, heads: Sequence[Head], dim: int, classes: int, ranks: Ranks, seed: int, affine: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.layers = tuple(heads), dim, max(head.layers for head in heads)
        self.norm = SynchronisedBatchNorm(dim * self.layers, ranks)
        # Without torch's initialisation, which would advance the global generator.
        linears = [nn.utils.skip_init(nn.Linear, dim * head.layers, classes) for head in heads]
        for head, linear in zip(heads, linears, strict=True):
            # The same for every learning rate, so that one more in the grid changes none of the others.
            generator = seeded_generator("cpu", seed, "head", head.layers, int(head.batch_norm))
            nn.init.normal_(linear.weight, std=0.01, generator=generator)
            nn.init.zeros_(linear.bias)
        self.linears: Sequence[nn.Linear] = nn.ModuleList(linears)  # type: ignore[assignment]
        norms = [affine and head.batch_norm for head in heads]
        widths = [linear.in_features for linear in linears]
        self.affines: Sequence[nn.Module] = nn.ModuleList(  # type: ignore[assignment]
            ScaleAndShift(width) if norm else nn.Identity() for norm, width in zip(norms, widths, strict=True)
        )

    def logits(self, features: Float[Tensor, "batch layers_times_dim"]) -> Float[Tensor, "heads batch classes"]:
        """Return the class scores of each head; a head takes the last columns of the features."""
        normed = self.norm(features)
        inputs = [(normed if head.batch_norm else features)[:, -head.layers * self.dim :] for head in self.heads]
        ends = zip(self.linears, self.affines, inputs, strict=True)
        return torch.stack([linear(affine(part)) for linear, affine, part in ends])

    def forward(
        self, features: Float[Tensor, "batch layers_times_dim"], labels: Int[Tensor, " batch"]
    ) -> Float[Tensor, " heads"]:
        """Return the cross-entropy of each head, summed over the batch."""
        logits = self.logits(features)
        targets = labels.expand(len(logits), -1).flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(len(logits), -1).sum(1)


def sum_of_products(features: Float[Tensor, "batch dim"]) -> Float64[Tensor, "dim_and_one dim_and_one"]:
    """Return the products of all pairs of features, and of each with one, summed over the images."""
    extended = F.pad(features.double(), (0, 1), value=1.0)
    return extended.T @ extended


def inverse_curvature(
    moments: Float64[Tensor, "dim_and_one dim_and_one"],
    columns: int,
    standardised: bool,
    classes: int,
    weight_decay: float,
) -> Float[Tensor, "columns_and_one columns_and_one"]:
    """Return the matrix that turns the gradient of a head's weights and bias into a Newton step from equal scores.

    Args:
        moments: means of the products of `sum_of_products`.
        columns: number of last features that the head sees.
        standardised: whether the head sees them standardised.
        weight_decay: the loss includes half of it times the square of weights and biases.
    """
    seen = moments[-columns - 1 :, -columns - 1 :]
    if standardised:
        mean = seen[-1, :-1]
        covariance = seen[:-1, :-1] - mean.outer(mean)
        scale = (covariance.diagonal().clamp(min=0) + BATCH_NORM_EPS).rsqrt()
        seen = torch.block_diag(covariance * scale.outer(scale), seen[-1:, -1:])
    variances, directions = torch.linalg.eigh(seen)
    evenly = 1 / classes * (1 - 1 / classes)
    curvatures = evenly * (variances.clamp(min=0) + DAMPING * variances.mean()) + weight_decay
    return ((directions / curvatures) @ directions.T).float()


@torch.no_grad()
def precondition(
    linear: nn.Linear, inverse: Float[Tensor, "columns_and_one columns_and_one"], weight_decay: float
) -> None:
    """Replace the gradient of a head by its preconditioned step, weight decay included."""
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    slopes = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], 1)
    slopes += weight_decay * torch.cat([linear.weight, linear.bias[:, None]], 1)
    step = slopes @ inverse
    linear.weight.grad.copy_(step[:, :-1])
    linear.bias.grad.copy_(step[:, -1])


def held_out_images(images: int) -> int:
    """Return how many training images choose among the heads.

    A fifth, up to 2,500 or, of more than 50,000, a twentieth, up to 10,000; but at least 200 where that leaves half.
    """
    fifth, twentieth, least = min(images / 5, 2_500), min(images / 20, 10_000), min(200, images / 2)
    return round(max(fifth, twentieth, least))


def lr_factor(protocol: Protocol, epoch: float) -> float:
    """Return the learning rate at an epoch, as a fraction of the first one."""
    if protocol.final_factor is not None:
        reached = math.floor(epoch) if protocol.by_epoch else epoch
        return cosine(reached / protocol.epochs, 1.0, protocol.final_factor)
    return 0.1 ** bisect_right(protocol.milestones, epoch)


class LinearTraining(LabelledTraining):
    """The training of the heads of an encoder."""

    # BatchNorm needs two images.
    least_images = 2

    def __init__(self, encoder: FrozenEncoder, train: LabelledSet, batch_size: int, conditions: Conditions) -> None:
        self.protocol = protocol = conditions.protocol
        ranks = conditions.ranks
        encoder.to(ranks.device)
        used, self.held_out = hold_out(train, 1.0, held_out_images(len(train)), conditions.seed)
        # Of the last layer and of the last four, without and with BatchNorm, at every learning rate.
        kinds = product(sorted({1, min(LAYERS, encoder.depth)}), (False, True), protocol.lrs)
        heads, classes = [Head(*kind) for kind in kinds], int(train.classes.max()) + 1
        affine, self.classifiers = not protocol.preconditioned, len(heads)
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
        self.distributed = distribute(self.heads, ranks)
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

    def update(self, images: Images, labels: Int[Tensor, " batch"], lr: float, seed: int) -> Outcome:
        """Take a step of all heads; it counts as one if at least one of them has a finite loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak_lr"] * lr
        features = self.features(images)
        self.optimiser.zero_grad(set_to_none=True)
        # Processes may have different numbers of images, and each image has the same weight.
        count = reduce_mean(torch.full((), float(len(labels)), device=self.ranks.device), self.ranks)
        losses = self.distributed(features, labels) / count
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

    def features(self, images: Images) -> Float[Tensor, "batch layers_times_dim"]:
        """Return frozen features of the last layers in full precision."""
        at_a_time = self.speed.batch_size_per_device or IMAGES_AT_A_TIME
        # Not inference_mode: its tensors cannot be used for the heads' gradients.
        with torch.no_grad(), autocast_for(self.speed.precision, self.ranks.device):
            parts = [self.encoder.embed(part, self.heads.layers) for part in images.split(at_a_time)]
        return torch.cat([part.float() for part in parts])

    def predict(self, images: Images) -> Float[Tensor, "heads batch classes"]:
        return self.heads.logits(self.features(images))
