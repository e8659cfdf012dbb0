"""Linear probe: logistic regression on frozen features, with every choice made on held-out training images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from stop_mim.constraints import ABOVE_ZERO, Checked, Each
from stop_mim.data.stored import Progress
from stop_mim.evaluation.features import Chunks, LabelledFeatures
from stop_mim.evaluation.logistic import STEPS, TrainingFeatures, choose_penalty, top_accuracy
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.results import Scalar, Score, accuracy


@dataclass(frozen=True)
class LinearOptions(Checked, group="linear"):
    """The fast linear probe."""

    standardise: tuple[bool, ...] = (True, False)
    """Standardised features (batch_norm), plain ones, or both; held-out images choose."""
    layers: Annotated[tuple[int, ...], Each(ABOVE_ZERO)] = (1, 4)
    """Features of so many last layers, concatenated; of several numbers, held-out images choose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("standardise", bool(self.standardise), "give True, False or both")


@TASKS.register("linear")
class Linear(FeatureTask):
    """The linear probe of every labelling."""

    help = "fast linear probe, L2-regularised logistic regression on cached features"
    Options: ClassVar[type | None] = LinearOptions
    options: LinearOptions

    def scores(self, train: LabelledFeatures, test: LabelledFeatures) -> Iterator[Score]:
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


def linear_probe(
    train: Mapping[int, Chunks],
    train_labels: Int[Tensor, " n"],
    test: Mapping[int, Chunks],
    test_labels: Int[Tensor, " m"],
    classes: int,
    device: torch.device,
    standardise: Sequence[bool] = (True, False),
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Score]:
    """Yield the scores of a probe of each kind of features, then of the kind that does best on held-out images.

    Args:
        train: features by the number of last layers that they are of.
        test: the same of the test images.
        standardise: with standardisation (batch_norm), without, or both.
    """
    variants = [(layers, scaled) for layers in train for scaled in standardise]
    best_held_out, best = -1.0, list[Score]()
    for number, (layers, scaled) in enumerate(variants):
        searches = 2 * number

        def tick(step: int, steps: int) -> None:
            if progress is not None:
                progress(searches * steps + step, 2 * len(variants) * steps)  # noqa: B023 - called before the next one

        chosen = choose_penalty(train[layers], train_labels, classes, device, scaled, seed, tick)
        searches += 1
        (probe,) = TrainingFeatures(train[layers], train_labels, classes, device, scaled).fit([chosen.penalty], tick)
        logits = torch.cat([probe.logits(chunk.to(device)) for chunk in test[layers]])
        variant: dict[str, Scalar] = {"batch_norm": scaled}
        scores = [
            accuracy(k, 100 * top_accuracy(logits, test_labels.to(device), k), len(logits), layers, variant)
            for k in (1, 5)
            if k < classes
        ]
        scores.append(Score("penalty", chosen.penalty, layers, variant, unit=""))
        scores.append(Score("held_out_top1", 100 * chosen.held_out, layers, variant))
        yield from scores
        if chosen.held_out > best_held_out:
            best_held_out, best = chosen.held_out, scores
    if progress is not None:
        progress(2 * len(variants) * STEPS, 2 * len(variants) * STEPS)
    for score in best:
        yield replace(score, layers=None, variant={}, headline=score.metric == "top1")
