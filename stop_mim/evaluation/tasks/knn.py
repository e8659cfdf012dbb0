"""Weighted nearest neighbours among frozen features."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.results import Score, accuracy

if TYPE_CHECKING:
    from stop_mim.evaluation.features import LabelledFeatures

# The headline is of this number of neighbours, or of the nearest one that is asked for.
USUAL_NEIGHBOURS = 20


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

    help = "weighted nearest neighbours by cosine"
    Options = KnnOptions
    options: KnnOptions

    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        """Yield the test accuracy for each number of neighbours."""
        from stop_mim.models.accuracy import top_accuracy
        from stop_mim.models.neighbours import knn_votes

        device = self.subject.ranks.device
        keys, labels = train.features.last(1).chunks_for(self.subject.ranks), train.labels.to(device)
        queries, truth = test.last_layer(device)
        ks = sorted({min(k, len(labels)) for k in self.options.neighbours})
        votes = knn_votes(keys, labels, queries, ks, self.data.classes, self.options.temperature, self.progress)
        usual = min(ks, key=lambda k: abs(k - USUAL_NEIGHBOURS))
        for k in ks:
            percent = top_accuracy(votes[k], truth)
            yield accuracy(1, percent, len(queries), variant={"neighbours": k}, headline=k == usual)
