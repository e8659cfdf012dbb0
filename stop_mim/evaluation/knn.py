"""Weighted nearest neighbours on frozen features: as they are, and centred on the mean of the training set."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.evaluation.accuracy import top_accuracy
from stop_mim.evaluation.linear import Chunks, FitProgress
from stop_mim.models.neighbours import TEMPERATURE, nearest, votes

QUERIES_AT_A_TIME = 2048


def knn(
    train: Chunks,
    train_labels: Int[Tensor, " n"],
    test: Chunks,
    test_labels: Int[Tensor, " m"],
    classes: int,
    device: torch.device,
    neighbours: Sequence[int] = (10, 20, 100, 200),
    temperature: float = TEMPERATURE,
    progress: FitProgress | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields the test accuracy in percent for each number of neighbours, of features and of centred features.

    Pooled tokens often share a large mean, which makes all cosines alike; the usual protocol leaves it in.
    """
    count = sum(len(chunk) for chunk in train)
    asked = sorted({min(k, count) for k in neighbours})
    mean = sum((chunk.to(device).double().sum(0) for chunk in train), torch.zeros(1, device=device)) / count
    queries = torch.cat([chunk.to(device).float() for chunk in test])
    labels = train_labels.to(device)
    for step, (name, centre) in enumerate((("knn", None), ("knn-centred", mean.float()))):
        scores: dict[int, list[Float[Tensor, "part classes"]]] = {k: [] for k in asked}
        for part in queries.split(QUERIES_AT_A_TIME):
            cosine, found = nearest(train, part, asked[-1], centre)
            for k in asked:
                scores[k].append(votes(cosine[:, :k], labels[found[:, :k]], classes, temperature))
            if progress is not None:
                done = step * len(queries) + sum(map(len, scores[asked[0]]))
                progress(done, 2 * len(queries))
        for k in asked:
            yield f"{name}/top1@{k}", 100 * top_accuracy(torch.cat(scores[k]), test_labels.to(device), 1)
