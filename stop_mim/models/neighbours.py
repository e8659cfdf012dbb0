"""Nearest neighbours in feature space, by cosine, and their votes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

TEMPERATURE = 0.07
QUERIES_AT_A_TIME = 1024
KEYS_AT_A_TIME = 131_072


def nearest(
    keys: Sequence[Float[Tensor, "_ dim"]],
    queries: Float[Tensor, "m dim"],
    k: int,
    centre: Float[Tensor, " dim"] | None = None,
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Return cosines and indices of the k nearest keys, nearest first.

    Args:
        keys: features in chunks, on any device; the work is done on the device of the queries.
        centre: subtracted from keys and queries.
    """
    shift = torch.zeros_like(queries[0]) if centre is None else centre
    queries = F.normalize(queries - shift, dim=1)
    cosines, numbers, first = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0).long(), 0
    for chunk in keys:
        for part in chunk.split(KEYS_AT_A_TIME):
            block = queries @ F.normalize(part.to(queries, non_blocking=True) - shift, dim=1).T
            here, where = block.topk(min(k, len(part)), dim=1)
            cosines, numbers = torch.cat([cosines, here], 1), torch.cat([numbers, where + first], 1)
            cosines, order = cosines.topk(min(k, cosines.shape[1]), dim=1)
            numbers = numbers.gather(1, order)
            first += len(part)
    return cosines, numbers


def votes(
    cosines: Float[Tensor, "m k"], labels: Int[Tensor, "m k"], classes: int, temperature: float = TEMPERATURE
) -> Float[Tensor, "m classes"]:
    """Return the votes of neighbours with these labels, each of weight exp(cosine / temperature)."""
    # Weights relative to the nearest: the same ranking of classes, and no overflow at low temperatures.
    weights = ((cosines - cosines[:, :1]) / temperature).exp()
    return weights.new_zeros(len(weights), classes).scatter_add(1, labels, weights)


def knn_votes(
    train_features: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    queries: Float[Tensor, "m dim"],
    k: int,
    classes: int,
) -> Float[Tensor, "m classes"]:
    """Return the votes of the k nearest training images."""
    parts = []
    for part in queries.split(QUERIES_AT_A_TIME):
        cosines, numbers = nearest([train_features], part, k)
        parts.append(votes(cosines, train_labels[numbers], classes))
    return torch.cat(parts)
