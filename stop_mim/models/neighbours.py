"""Nearest neighbours in feature space, by cosine, and their votes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.data.stored import Progress

TEMPERATURE = 0.07
# These bound memory.
QUERIES_AT_A_TIME = 2048
KEYS_AT_A_TIME = 131_072


def knn_votes(
    keys: Sequence[Float[Tensor, "_ dim"]],
    labels: Int[Tensor, " n"],
    queries: Float[Tensor, "m dim"],
    ks: Sequence[int],
    classes: int,
    temperature: float = TEMPERATURE,
    progress: Progress | None = None,
) -> dict[int, Float[Tensor, "m classes"]]:
    """Return, for each k, the votes of the k nearest keys for each class; the weight of a vote is exp(cosine / temperature).

    Args:
        keys: features in chunks, on any device; the work is done on the device of the queries.
        labels: the class of each key, on the device of the queries.
        progress: called with the number of queries that are done, and of all.
    """
    found: dict[int, list[Tensor]] = {k: [] for k in ks}
    done = 0
    for part in queries.split(QUERIES_AT_A_TIME):
        cosines, numbers = nearest(keys, part, max(ks))
        # Weights relative to the nearest: the same ranking of classes, and no overflow at low temperatures.
        weights = ((cosines - cosines[:, :1]) / temperature).exp()
        for k, parts in found.items():
            zeros = weights.new_zeros(len(part), classes)
            parts.append(zeros.scatter_add(1, labels[numbers[:, :k]], weights[:, :k]))
        done += len(part)
        if progress is not None:
            progress(done, len(queries))
    return {k: torch.cat(parts) for k, parts in found.items()}


def nearest(
    keys: Sequence[Float[Tensor, "_ dim"]], queries: Float[Tensor, "m dim"], k: int
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Return cosines and indices of the k nearest keys (all if there are fewer), nearest first."""
    queries = F.normalize(queries, dim=1)
    cosines, numbers, first = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0).long(), 0
    for chunk in keys:
        for part in chunk.split(KEYS_AT_A_TIME):
            block = queries @ F.normalize(part.to(queries, non_blocking=True), dim=1).T
            here, where = block.topk(min(k, len(part)), dim=1)
            cosines, numbers = torch.cat([cosines, here], 1), torch.cat([numbers, where + first], 1)
            cosines, order = cosines.topk(min(k, cosines.shape[1]), dim=1)
            numbers = numbers.gather(1, order)
            first += len(part)
    return cosines, numbers
