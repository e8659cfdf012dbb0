"""The paper's linear protocol: heads on frozen features of augmented images, all trained at once by SGD.

A held-out part of the training images chooses among the heads; the test set is scored once, and decides nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from stop_mim.constraints import ABOVE_ZERO, Checked, Each, Number
from stop_mim.evaluation.task import TASKS, TOP, TrainingTask
from stop_mim.options import AugmentConfig
from stop_mim.results import Scalar, Score, accuracy

if TYPE_CHECKING:
    from stop_mim.evaluation.linear_heads import LinearTraining
    from stop_mim.evaluation.protocols import Protocol


@dataclass(frozen=True)
class LinearSGDOptions(Checked, group="linear_sgd"):
    """The SGD protocol; values that are not given are those of the data's protocol."""

    epochs: Annotated[int | None, ABOVE_ZERO] = None
    """Passes over the training images."""
    batch_size: Annotated[int, Number("give at least 2 images", at_least=2)] = 256
    """Images per update, over all devices."""
    lrs: Annotated[tuple[float, ...] | None, Each(ABOVE_ZERO)] = None
    """Learning rates for a batch of 256, tried at once; held-out images choose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("lrs", self.lrs is None or len({*self.lrs}) == len(self.lrs), "give different numbers")


@TASKS.register("linear-sgd")
class LinearSGD(TrainingTask):
    """Linear heads trained by SGD on augmented images."""

    help = "the paper's linear protocol: SGD on augmented images, four heads at once"
    Options = LinearSGDOptions
    options: LinearSGDOptions

    def protocol(self) -> "Protocol":
        """Return the protocol of the data, with the epochs and learning rates of the options."""
        protocol, options = self.subject.protocol(self.data), self.options
        protocol = protocol if options.epochs is None else protocol.shortened(options.epochs)
        return protocol if options.lrs is None else replace(protocol, lrs=options.lrs)

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.protocol()), "batch_size": self.options.batch_size}

    def training(self) -> "LinearTraining":
        from stop_mim.evaluation.linear_heads import LinearTraining

        conditions = self.conditions(AugmentConfig(crop_scale=(0.08, 1.0), flip_probability=0.5))
        return LinearTraining(self.subject.encoder, self.data.train, self.options.batch_size, conditions)

    def results(self, training: "LinearTraining") -> Iterator[Score]:
        """Yield the scores of every head, then those that held-out images choose: of each kind, and of all."""
        held_out, _ = training.score(training.held_out)
        tested, images = training.score(self.data.test)
        heads, several = training.heads.heads, len(training.protocol.lrs) > 1

        def scores(number: int, layers: int | None, variant: dict[str, Scalar]) -> Iterator[Score]:
            yield Score("held_out_top1", held_out[number][0], layers, variant)
            for top, value in zip(TOP, tested[number], strict=True):
                if top < self.data.classes:
                    yield accuracy(top, value, images, layers, variant, layers is None and top == 1)

        def best(numbers: Iterable[int]) -> int:
            return max(numbers, key=lambda number: held_out[number][0])

        for number, head in enumerate(heads):
            rate: dict[str, Scalar] = {"lr": head.lr} if several else {}
            yield from scores(number, head.layers, {"batch_norm": head.batch_norm, **rate})
        for layers, norm in dict.fromkeys((head.layers, head.batch_norm) for head in heads) if several else ():
            chosen = best(n for n, head in enumerate(heads) if (head.layers, head.batch_norm) == (layers, norm))
            yield Score("lr", heads[chosen].lr, layers, {"batch_norm": norm}, unit="")
            yield from scores(chosen, layers, {"batch_norm": norm})
        chosen = best(range(len(heads)))
        for name, value in asdict(heads[chosen]).items():
            yield Score(name, float(value), unit="")
        yield from scores(chosen, None, {})
