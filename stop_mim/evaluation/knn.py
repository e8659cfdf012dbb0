"""Weighted nearest neighbours on frozen features."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

TEMPERATURE = 0.07
QUERIES_AT_A_TIME = 1024


def knn_votes(
    train_features: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    queries: Float[Tensor, "m dim"],
    k: int,
    classes: int,
    temperature: float = TEMPERATURE,
) -> Float[Tensor, "m classes"]:
    """Votes of the k nearest training images by cosine, each weighing exp(cosine / temperature)."""
    keys = F.normalize(train_features, dim=1)
    votes = []
    for part in F.normalize(queries, dim=1).split(QUERIES_AT_A_TIME):
        cosine, nearest = (part @ keys.T).topk(min(k, len(keys)), dim=1)
        # Weights relative to the nearest: the same ranking of classes, and no overflow at low temperatures.
        weights = ((cosine - cosine[:, :1]) / temperature).exp()
        votes.append(torch.zeros(len(part), classes, device=part.device).scatter_add(1, train_labels[nearest], weights))
    return torch.cat(votes)


def knn(
    train_features: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
    neighbours: Sequence[int] = (20,),
) -> Iterator[tuple[str, float]]:
    """Yields the test accuracy in percent for each number of neighbours."""
    classes = int(train_labels.max()) + 1
    for k in neighbours:
        votes = knn_votes(train_features, train_labels, test_features, k, classes)
        yield f"knn/top1@{k}", 100 * (votes.argmax(1) == test_labels).float().mean().item()
