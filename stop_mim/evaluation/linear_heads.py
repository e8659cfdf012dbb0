"""Linear classifiers of frozen features, side by side, with BatchNorm before them or without."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from stop_mim.seeds import seeded_generator
from stop_mim.training.distributed import Ranks, reduce_mean


@dataclass(frozen=True)
class Head:
    """What one of the linear heads sees, and how fast it learns."""

    layers: int
    batch_norm: bool
    lr: float

    def name(self, with_lr: bool = False) -> str:
        """A name such as last4+bn, or last4+bn@0.01."""
        return f"last{self.layers}{'+bn' if self.batch_norm else ''}{f'@{self.lr:g}' if with_lr else ''}"


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d without scale and shift, with the statistics of the images of all processes.

    Its inputs are frozen features, so that no gradient has to be carried between the processes.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, ranks: Ranks) -> None:
        super().__init__(features, affine=False)
        self.ranks = ranks

    def fix(self, moments: Float64[Tensor, "dim_and_one dim_and_one"]) -> None:
        """Standardise by these means of products from now on, in training too.

        A batch's own statistics are off by some percent, and where features are correlated that is more than they vary
        along most of their principal components.
        """
        mean = moments[-1, :-1]
        self.running_mean.copy_(mean)
        self.running_var.copy_(moments.diagonal()[:-1] - mean.square())
        self.eval()

    def forward(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Standardised features: by the batch in training, else by the running statistics."""
        if not self.training or self.ranks.world_size == 1:
            return super().forward(features)
        # Of bad files alone, no process may have an image.
        count = reduce_mean(features.new_full((), len(features)), self.ranks).clamp(min=1 / self.ranks.world_size)
        mean = reduce_mean(features.sum(0), self.ranks) / count
        variance = reduce_mean((features - mean).square().sum(0), self.ranks) / count
        total = count * self.ranks.world_size
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * total / (total - 1).clamp(min=1), self.momentum)
        self.num_batches_tracked.add_(1)
        return (features - mean) * (variance + self.eps).rsqrt()


class LinearHeads(nn.Module):
    """Linear classifiers side by side; those with BatchNorm share one, as it has nothing to learn."""

    def __init__(self, heads: tuple[Head, ...], dim: int, classes: int, ranks: Ranks, seed: int = 0) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = SynchronisedBatchNorm(dim * max(head.layers for head in heads), ranks)
        # Without the library's own initial weights, which would move the global generator.
        linears = [nn.utils.skip_init(nn.Linear, dim * head.layers, classes) for head in heads]
        for head, linear in zip(heads, linears, strict=True):
            # The same at every learning rate, so that one more in the grid changes none of the others.
            generator = seeded_generator("cpu", seed, "head", head.layers, int(head.batch_norm))
            nn.init.normal_(linear.weight, std=0.01, generator=generator)
            nn.init.zeros_(linear.bias)
        self.linears: Sequence[nn.Linear] = nn.ModuleList(linears)  # type: ignore[assignment]

    def logits(self, features: Float[Tensor, "batch layers_times_dim"]) -> Float[Tensor, "heads batch classes"]:
        """Scores of the classes by each head; of the features, a head takes the last columns."""
        normed = self.norm(features)
        inputs = [(normed if head.batch_norm else features)[:, -head.layers * self.dim :] for head in self.heads]
        return torch.stack([linear(part) for linear, part in zip(self.linears, inputs, strict=True)])

    def forward(
        self, features: Float[Tensor, "batch layers_times_dim"], labels: Int[Tensor, " batch"]
    ) -> Float[Tensor, " heads"]:
        """The cross-entropy of each head, summed over the batch."""
        logits = self.logits(features)
        targets = labels.expand(len(logits), -1).flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(len(logits), -1).sum(1)
