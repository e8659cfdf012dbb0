"""Linear probe: logistic regression on frozen features, with every choice made on held-out training images."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, ClassVar

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.evaluation.task import TASKS, TOP, FeatureTask, options_of
from stop_mim.results import Scalar, Score, accuracy

if TYPE_CHECKING:
    from stop_mim.data.stored import Progress
    from stop_mim.evaluation.features import LabelledFeatures


@dataclass(frozen=True)
class LinearOptions(Checked, group="linear"):
    """The fast linear probe."""

    standardise: tuple[bool, ...] = (True, False)
    """Standardised features (batch_norm), plain ones, or both; held-out images choose."""
    layers: Annotated[tuple[int, ...], Each(ABOVE_ZERO)] = (1, 4)
    """Numbers of last layers whose features are concatenated; of several, held-out images choose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("standardise", bool(self.standardise), "give True, False or both")


@TASKS.register("linear")
class Linear(FeatureTask):
    """The linear probe of every labelling."""

    help = "fast linear probe, L2-regularised logistic regression on cached features"
    Options: ClassVar[type | None] = LinearOptions
    options: LinearOptions

    @property
    def layers(self) -> int:
        return max(self.options.layers)

    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        """Yield the scores of a probe of each kind of features, then of the kind that does best on held-out images."""
        import torch

        from stop_mim.evaluation.logistic import TrainingFeatures, choose_penalty
        from stop_mim.models.accuracy import top_accuracy

        device, classes, kinds = self.subject.ranks.device, self.data.classes, self.options.standardise
        truth = test.labels.to(device)
        numbers = sorted({min(layers, train.features.layers) for layers in self.options.layers})
        searches, total = count(), 2 * len(numbers) * len(kinds)

        def progress() -> "Progress":
            search = next(searches)
            return lambda step, steps: self.progress(search * steps + step, total * steps)

        best_held_out, best = -1.0, list[Score]()
        for layers in numbers:
            learned, tested = (part.features.last(layers).chunks_for(self.subject.ranks) for part in (train, test))
            for scaled in kinds:
                given = train.labels, classes, device, scaled
                chosen = choose_penalty(learned, *given, self.config.seed, progress())
                (probe,) = TrainingFeatures(learned, *given).fit([chosen.penalty], progress())
                logits = torch.cat([probe.logits(chunk.to(device)) for chunk in tested])
                variant: dict[str, Scalar] = {"batch_norm": scaled}
                tops = {k: top_accuracy(logits, truth, k) for k in TOP if k < classes}
                scores = [accuracy(k, percent, len(logits), layers, variant) for k, percent in tops.items()]
                scores.append(Score("penalty", chosen.penalty, layers, variant, unit=""))
                scores.append(Score("held_out_top1", chosen.held_out, layers, variant))
                yield from scores
                if chosen.held_out > best_held_out:
                    best_held_out, best = chosen.held_out, scores
        for score in best:
            yield replace(score, layers=None, variant={}, headline=score.metric == "top1")


@TASKS.register("clevr")
class Clevr(Linear):
    """CLEVR/Count and CLEVR/Dist: the task linear, with its options, of counts and distances alone."""

    help = "the linear probe of object counts and of the nearest object's distance"
    Options = None
    labels = ("count", "distance")
    in_all = False

    def find_options(self) -> LinearOptions:
        return options_of(self.config, "linear")
