"""Weighted nearest neighbours on frozen features: as they are, and centred on the mean of the training set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.data.stored import Progress
from stop_mim.evaluation.features import Chunks, LabelledFeatures
from stop_mim.evaluation.logistic import top_accuracy
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.models.neighbours import TEMPERATURE, nearest, votes
from stop_mim.results import Score, accuracy

QUERIES_AT_A_TIME = 2048
# The headline is of this number of neighbours, or of the nearest one that is asked for.
USUAL_NEIGHBOURS = 20


@dataclass(frozen=True)
class KnnOptions(Checked, group="knn"):
    """Nearest neighbours."""

    neighbours: Annotated[tuple[int, ...], Each(ABOVE_ZERO)] = (10, 20, 100, 200)
    """Numbers of neighbours that vote."""
    temperature: Annotated[float, ABOVE_ZERO] = TEMPERATURE
    """A neighbour has the weight exp(cosine / temperature)."""


@TASKS.register("knn")
class Knn(FeatureTask):
    """Nearest neighbours among the last layer's features."""

    help = "weighted nearest neighbours by cosine, of plain and of centred features"
    Options = KnnOptions
    options: KnnOptions

    def scores(self, train: LabelledFeatures, test: LabelledFeatures) -> Iterator[Score]:
        chunks = [self.subject.chunks(part.features.last(1)) for part in (train, test)]
        return knn(
            chunks[0],
            train.labels,
            chunks[1],
            test.labels,
            self.data.classes,
            self.subject.ranks.device,
            self.options.neighbours,
            self.options.temperature,
            self.progress,
        )


def knn(
    train: Chunks,
    train_labels: Int[Tensor, " n"],
    test: Chunks,
    test_labels: Int[Tensor, " m"],
    classes: int,
    device: torch.device,
    neighbours: Sequence[int],
    temperature: float = TEMPERATURE,
    progress: Progress | None = None,
) -> Iterator[Score]:
    """Yield the test accuracy for each number of neighbours, of features and of centred features.

    Pooled tokens often share a large mean, which makes all cosines similar; the usual protocol does not subtract it.
    """
    count = sum(len(chunk) for chunk in train)
    asked = sorted({min(k, count) for k in neighbours})
    usual = min(asked, key=lambda k: abs(k - USUAL_NEIGHBOURS))
    mean = sum((chunk.to(device).double().sum(0) for chunk in train), torch.zeros(1, device=device)) / count
    queries = torch.cat([chunk.to(device).float() for chunk in test])
    labels = train_labels.to(device)
    for centred in (False, True):
        found: dict[int, list[Float[Tensor, "part classes"]]] = {k: [] for k in asked}
        for part in queries.split(QUERIES_AT_A_TIME):
            cosines, numbers = nearest(train, part, asked[-1], mean.float() if centred else None)
            for k in asked:
                found[k].append(votes(cosines[:, :k], labels[numbers[:, :k]], classes, temperature))
            if progress is not None:
                progress(centred * len(queries) + sum(map(len, found[asked[0]])), 2 * len(queries))
        for k in asked:
            shown = not centred and k == usual
            percent = 100 * top_accuracy(torch.cat(found[k]), test_labels.to(device), 1)
            yield accuracy(1, percent, len(queries), variant={"centred": centred, "neighbours": k}, headline=shown)
