"""Top-k accuracy of class scores."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def top_hits(
    scores: Float[Tensor, "*heads n classes"], labels: Int[Tensor, " n"], ks: Sequence[int]
) -> Bool[Tensor, "*heads n ks"]:
    """Return, for each image and k, whether its class is among the k that score highest.

    An image whose scores are not finite is never right.
    """
    highest = scores.topk(min(max(ks), scores.shape[-1]), dim=-1).indices == labels[:, None]
    hits = torch.stack([highest[..., :k].any(-1) for k in ks], dim=-1)
    return hits & torch.isfinite(scores).all(-1, keepdim=True)


def top_accuracy(scores: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], k: int = 1) -> float:
    """Return the percentage of the images whose class is among the k that score highest."""
    return 100 * top_hits(scores, labels, [k]).double().mean().item()
