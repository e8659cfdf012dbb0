"""Few labels: logistic regression on frozen features of a part of the training images, over several draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from stop_mim.constraints import ABOVE_ZERO, Checked, Constraint, Each
from stop_mim.errors import InputError
from stop_mim.evaluation.task import TASKS, TOP, FeatureTask, Task, options_of
from stop_mim.results import Scalar, Score, accuracy

if TYPE_CHECKING:
    from stop_mim.data.labelled import LabelledSet
    from stop_mim.evaluation.features import LabelledFeatures
    from stop_mim.evaluation.logistic import Draw
    from stop_mim.evaluation.protocols import Protocol

LIST = "list"
# Fractions that differ by more than this part of what was asked for are noted.
NOTED_DIFFERENCE = 0.1


def parse_amount(amount: str) -> float | int:
    """Return a fraction as a float, or images per class as an int."""
    return float(amount[:-1]) / 100 if amount.endswith("%") else int(amount)


def _is_amount(amount: str) -> bool:
    number = parse_amount(amount)
    return 0 < number <= 1 if isinstance(number, float) else number > 0


AMOUNT = Constraint("give fractions such as 1%, up to 100%, or images per class such as 5", _is_amount)


@dataclass(frozen=True)
class LowShotOptions(Checked, group="low_shot"):
    """The amounts of labels."""

    amounts: Annotated[tuple[str, ...], Each(AMOUNT)] = ("1%", "10%")
    """Fractions of the training images (1%) or images per class (5)."""
    list_file: Path | None = None
    """A text file with the names of the labelled images, one per line, instead of the amounts."""
    draws: Annotated[int, ABOVE_ZERO] = 3
    """How many times each amount is drawn."""
    total_penalty: Annotated[float | None, ABOVE_ZERO] = None
    """A fixed penalty, of all images together, as the paper's 0.0025: the loss of n images has the penalty 0.0025 / n
    (scikit-learn's C is 1 / 0.0025). Not given: chosen by cross-validation, above 2,000 images on a held-out fifth."""


class FewLabels(Task):
    """A task that learns from draws of the training images."""

    @property
    def few(self) -> LowShotOptions:
        return options_of(self.config, "low-shot")

    @cached_property
    def draws(self) -> dict[str, list[np.ndarray]]:
        """The labelled images of each draw, by amount ("list" for a list), as sorted indices of the source."""
        from stop_mim.data.labelled import draw_fraction, draw_per_class, read_image_list

        few, data, seed = self.few, self.data.train, self.config.seed

        def drawn(name: str, draw: int) -> np.ndarray:
            amount = parse_amount(name)
            if isinstance(amount, float):
                return data.indices[draw_fraction(data.classes, amount, seed, draw)]
            return data.indices[draw_per_class(data.classes, amount, seed, draw, data.source.class_names)]

        if few.list_file is None:
            return {name: [drawn(name, draw) for draw in range(few.draws)] for name in few.amounts}
        chosen = read_image_list(few.list_file, data.source)
        if outside := len(np.setdiff1d(chosen, data.indices)):
            raise InputError(
                f"{outside} of the images that {few.list_file} names are held out as test images: give test images with "
                "--test-data."
            )
        return {LIST: [np.sort(chosen)]}

    def check(self) -> None:
        """Raise InputError for amounts or a list that do not fit the data."""
        from stop_mim.evaluation.data import class_name

        super().check()
        data, (first, *_) = self.data, next(iter(self.draws.values()))
        absent = np.setdiff1d(data.test.classes, data.train.labels[first])
        if self.few.list_file is not None and len(absent):
            name = class_name(int(absent[0]), data.train.source, data.test.source)
            raise InputError(
                f"{self.few.list_file} names no image of the class {name}, which the test data have: add one of every "
                "class."
            )

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each fraction that cannot be met, because each class gives a whole number of images."""
        total = len(self.data.train)
        for amount, (first, *_) in self.draws.items():
            wanted = parse_amount(amount) if amount != LIST else 0
            share = len(first) / total
            if isinstance(wanted, float) and abs(share - wanted) > NOTED_DIFFERENCE * wanted:
                yield (
                    f"{amount} of {total:,} images are {len(first):,} here ({share:.1%}): each class gives a whole number of "
                    "images, at least one."
                )

    def training_images(self) -> "LabelledSet":
        drawn = np.unique(np.concatenate([images for draws in self.draws.values() for images in draws]))
        return replace(self.data.train, indices=drawn)


@TASKS.register("low-shot")
class LowShot(FewLabels, FeatureTask):
    """Logistic regression with few labels, the penalty chosen by cross-validation or given."""

    help = "logistic regression with few labels, mean and deviation over draws"
    Options = LowShotOptions

    def protocol(self) -> "Protocol":
        return super().protocol().with_few_labels()

    def scores(self, train: "LabelledFeatures", test: "LabelledFeatures") -> Iterator[Score]:
        device, done, total = self.subject.ranks.device, 0, sum(map(len, self.draws.values()))
        tested = test.last_layer(device)
        for amount, draws in self.draws.items():
            few = [train.of_images(images).last_layer(device) for images in draws]
            yield from self._amount_scores(amount, few, tested)
            done += len(draws)
            self.progress(done, total)

    def _amount_scores(self, amount: str, draws: "Sequence[Draw]", test: "Draw") -> Iterator[Score]:
        """Yield mean and standard deviation of the test accuracy over the draws, then the scores of each draw.

        All draws are fitted together: first all their folds, then all draws with the penalties that these chose.
        """
        from stop_mim.evaluation.logistic import TrainingFeatures, choose_penalties, fit_together
        from stop_mim.models.accuracy import top_accuracy

        classes, total_penalty, images = self.data.classes, self.few.total_penalty, len(test[1])
        if total_penalty is None:
            penalties = [one.penalty for one in choose_penalties(draws, classes, self.config.seed)]
        else:
            penalties = [total_penalty / len(labels) for _, labels in draws]
        trainings = [TrainingFeatures([features], labels, classes, features.device) for features, labels in draws]
        logits = [probe.logits(test[0]) for (probe,) in fit_together(trainings, [[one] for one in penalties])]
        tops = {k: [top_accuracy(one, test[1], k) for one in logits] for k in TOP if k < classes}
        about: dict[str, Scalar] = {"amount": amount}
        for k, values in tops.items():
            if len(values) == 1:
                yield accuracy(k, values[0], images, variant=about, headline=k == 1)
            else:
                mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
                yield Score(f"top{k}", mean, variant=about, headline=k == 1, std=std)
        yield Score("images", float(len(draws[0][1])), variant=about, unit="")
        for draw, penalty in enumerate(penalties):
            yield accuracy(1, tops[1][draw], images, variant={**about, "draw": draw})
            yield Score("penalty", penalty, variant={**about, "draw": draw}, unit="")
