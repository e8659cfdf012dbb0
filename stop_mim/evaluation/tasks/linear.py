"""Linear probe: logistic regression on frozen features, with every choice made on held-out training images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.evaluation.task import TASKS, FeatureTask, options_of
from stop_mim.results import Score

if TYPE_CHECKING:
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

    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        from stop_mim.evaluation.probes import linear_probe

        layers = sorted({min(count, self.subject.encoder.depth) for count in self.options.layers})
        return linear_probe(
            {count: self.subject.chunks(train.features.last(count)) for count in layers},
            train.labels,
            {count: self.subject.chunks(test.features.last(count)) for count in layers},
            test.labels,
            self.data.classes,
            self.subject.ranks.device,
            self.options.standardise,
            self.config.seed,
            self.progress,
        )


@TASKS.register("clevr")
class Clevr(Linear):
    """CLEVR/Count and CLEVR/Dist: the task linear, with its options, of counts and distances alone."""

    help = "the linear probe of object counts and of the nearest object's distance"
    Options = None
    labels = ("count", "distance")
    in_all = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.options = options_of(self.config, "linear")
