"""Linear classifiers of frozen features, trained by SGD side by side, and the curvature that preconditions their steps.

Features of a network are correlated: they vary little along most principal components, and plain SGD, whose learning
rate is limited by the strongest component, hardly moves there. Preconditioned by the curvature, it moves equally fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from stop_mim.seeds import seeded_generator
from stop_mim.training.distributed import Ranks, reduce_mean

# A fraction of the mean of all variances: it bounds the steps along components without variance.
DAMPING = 1e-4


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

    def __init__(
        self, heads: Sequence[Head], dim: int, classes: int, ranks: Ranks, seed: int = 0, affine: bool = False
    ) -> None:
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
    epsilon: float = 1e-5,
) -> Float[Tensor, "columns_and_one columns_and_one"]:
    """Return the matrix that turns the gradient of a head's weights and bias into a Newton step from equal scores.

    Args:
        moments: means of the products of `sum_of_products`.
        columns: the head sees so many last features.
        standardised: whether the head sees them standardised.
        weight_decay: the loss includes half of it times the square of weights and biases.
        epsilon: that of BatchNorm.
    """
    seen = moments[-columns - 1 :, -columns - 1 :]
    if standardised:
        mean = seen[-1, :-1]
        covariance = seen[:-1, :-1] - mean.outer(mean)
        scale = (covariance.diagonal().clamp(min=0) + epsilon).rsqrt()
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
