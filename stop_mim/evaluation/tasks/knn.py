"""Weighted nearest neighbours on frozen features: as they are, and centred on the mean of the training set."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.results import Score

if TYPE_CHECKING:
    from stop_mim.evaluation.features import LabelledFeatures


@dataclass(frozen=True)
class KnnOptions(Checked, group="knn"):
    """Nearest neighbours."""

    neighbours: Annotated[tuple[int, ...], Each(ABOVE_ZERO)] = (10, 20, 100, 200)
    """Numbers of neighbours that vote."""
    temperature: Annotated[float, ABOVE_ZERO] = 0.07
    """A neighbour has the weight exp(cosine / temperature)."""


@TASKS.register("knn")
class Knn(FeatureTask):
    """Nearest neighbours among the last layer's features."""

    help = "weighted nearest neighbours by cosine, of plain and of centred features"
    Options = KnnOptions
    options: KnnOptions

    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        from stop_mim.evaluation.probes import knn

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
