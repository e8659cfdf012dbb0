"""Few labels: logistic regression on frozen features of a part of the training images, over several draws."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from stop_mim.constraints import ABOVE_ZERO, Checked, Constraint, Each
from stop_mim.data.image_lists import draw_fraction, draw_per_class, read_image_list
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.data import TaskData, class_name
from stop_mim.evaluation.features import LabelledFeatures
from stop_mim.evaluation.logistic import PENALTIES as WEAKER_PENALTIES
from stop_mim.evaluation.logistic import Chosen, TrainingFeatures, fit_together, held_out, top_accuracy
from stop_mim.evaluation.protocols import Protocol
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.results import Scalar, Score, accuracy

PENALTIES = (10.0, 1.0, *WEAKER_PENALTIES)
FOLDS = 5
# With more images than this, one held-out part is as good as folds.
FEW = 2000
# Where a class has a single image, nothing can be held out.
DEFAULT_PENALTY = 1e-2
LIST = "list"
# Fractions that differ by more than this part of what was asked for are noted.
NOTED_DIFFERENCE = 0.1

Draw = tuple[Float[Tensor, "_ dim"], Int[Tensor, " _"]]
"""Features of some images, and their labels."""


def parse_amount(amount: str) -> float | int:
    """Return a fraction as a float, or images per class as an int."""
    return float(amount[:-1]) / 100 if amount.endswith("%") else int(amount)


def _is_amount(amount: str) -> bool:
    number = parse_amount(amount)
    return 0 < number <= 1 if isinstance(number, float) else number > 0


AMOUNT = Constraint("give fractions such as 1%, up to 100%, or images per class such as 5", _is_amount)


@dataclass(frozen=True)
class LowShotOptions(Checked, group="low_shot"):
    """How few labels are used."""

    amounts: Annotated[tuple[str, ...], Each(AMOUNT)] = ("1%", "10%")
    """Fractions of the training images (1%) or images per class (5)."""
    list_file: Path | None = None
    """A text file with the names of the labelled images, one per line, instead of the amounts."""
    draws: Annotated[int, ABOVE_ZERO] = 3
    """How many times each amount is drawn."""
    total_penalty: Annotated[float | None, ABOVE_ZERO] = None
    """A fixed penalty, of all images together, as the paper's 0.0025: the loss of n images has the penalty 0.0025 / n
    (scikit-learn's C is 1 / 0.0025). Not given: chosen by cross-validation."""


@TASKS.register("low-shot")
class LowShot(FeatureTask):
    """Logistic regression with few labels, the penalty chosen by cross-validation or given."""

    help = "logistic regression with few labels, mean and deviation over draws"
    Options = LowShotOptions
    options: LowShotOptions

    @cached_property
    def draws(self) -> dict[str, list[np.ndarray]]:
        """The labelled images of each draw, by amount."""
        return label_draws(self.options, self.data.train, self.config.seed)

    def check(self) -> None:
        super().check()
        check_draws(self.draws, self.options, self.data)

    def notes(self) -> Iterator[str]:
        return draw_notes(self.draws, len(self.data.train))

    def protocol(self) -> Protocol:
        return super().protocol().with_few_labels()

    def training_images(self) -> LabelledSet:
        drawn = np.unique(np.concatenate([images for draws in self.draws.values() for images in draws]))
        return replace(self.data.train, indices=drawn)

    def scores(self, train: LabelledFeatures, test: LabelledFeatures) -> Iterator[Score]:
        device, features = self.subject.ranks.device, train.features.last(1)
        tested = test.features.last(1).on(device), test.labels.to(device)
        done, total = 0, sum(map(len, self.draws.values()))
        for amount, draws in self.draws.items():
            few = []
            for chosen in draws:
                rows = torch.isin(features.indices, torch.from_numpy(chosen)).nonzero()[:, 0]
                few.append((features.rows(rows).to(device), train.labels[rows].to(device)))
            yield from low_shot(amount, few, *tested, self.data.classes, self.config.seed, self.options.total_penalty)
            done += len(draws)
            self.progress(done, total)


def label_draws(options: LowShotOptions, data: LabelledSet, seed: int) -> dict[str, list[np.ndarray]]:
    """Return the labelled images of each draw, by amount ("list" for a list), as indices of the source."""
    if options.list_file is not None:
        chosen = read_image_list(options.list_file, data.source)
        if outside := len(np.setdiff1d(chosen, data.indices)):
            raise InputError(
                f"{outside} of the images that {options.list_file} names are held out as test images: name test images "
                "with --test-data."
            )
        return {LIST: [np.sort(chosen)]}
    return {
        amount: [data.indices[_draw(parse_amount(amount), data, seed, draw)] for draw in range(options.draws)]
        for amount in options.amounts
    }


def _draw(amount: float | int, data: LabelledSet, seed: int, draw: int) -> np.ndarray:
    if isinstance(amount, float):
        return draw_fraction(data.classes, amount, seed, draw)
    return draw_per_class(data.classes, amount, seed, draw, data.source.class_names)


def check_draws(draws: Mapping[str, Sequence[np.ndarray]], options: LowShotOptions, data: TaskData) -> None:
    """Raise InputError for a list that has no image of a class."""
    (first, *_), *_ = draws.values()
    absent = np.setdiff1d(data.test.classes, data.train.labels[first])
    if options.list_file is not None and len(absent):
        name = class_name(int(absent[0]), data.train.source, data.test.source)
        raise InputError(
            f"{options.list_file} names no image of the class {name}, which the test data have: name one of every class."
        )


def draw_notes(draws: Mapping[str, Sequence[np.ndarray]], total: int) -> Iterator[str]:
    """Yield a sentence for each fraction that is another one, because every class gives whole images and at least one."""
    for amount, (first, *_) in draws.items():
        wanted = parse_amount(amount) if amount != LIST else 0
        share = len(first) / total
        if isinstance(wanted, float) and abs(share - wanted) > NOTED_DIFFERENCE * wanted:
            yield (
                f"{amount} of {total:,} images are {len(first):,} here ({share:.1%}): every class gives whole images, "
                "and at least one."
            )


def low_shot(
    amount: str,
    draws: Sequence[Draw],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
    classes: int,
    seed: int = 0,
    total_penalty: float | None = None,
) -> Iterator[Score]:
    """Yield mean and standard deviation of the test accuracy over the draws, then the scores of each draw.

    All draws are fitted together: first all their folds, then all draws with the penalties that these chose.
    """
    if total_penalty is None:
        chosen = choose_penalties(draws, classes, seed)
    else:
        chosen = [Chosen(total_penalty / len(labels), float("nan")) for _, labels in draws]
    trainings = [_training(draw, None, classes) for draw in draws]
    fitted = fit_together(trainings, [[one.penalty] for one in chosen])
    logits = [probe.logits(test_features) for (probe,) in fitted]
    about: dict[str, Scalar] = {"amount": amount}
    images = len(test_labels)
    tops = {k: [100 * top_accuracy(one, test_labels, k) for one in logits] for k in (1, 5) if k < classes}
    for k, values in tops.items():
        if len(values) == 1:
            yield accuracy(k, values[0], images, variant=about, headline=k == 1)
        else:
            mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
            yield Score(f"top{k}", mean, variant=about, headline=k == 1, std=std)
    yield Score("images", float(len(draws[0][1])), variant=about, unit="")
    for draw, one in enumerate(chosen):
        yield accuracy(1, tops[1][draw], images, variant={**about, "draw": draw})
        yield Score("penalty", one.penalty, variant={**about, "draw": draw}, unit="")


def choose_penalties(draws: Sequence[Draw], classes: int, seed: int = 0) -> list[Chosen]:
    """Return, for each draw, the penalty with the best accuracy over folds of its images; of equals, the strongest."""
    parts = [(draw, fold) for draw, (_, labels) in enumerate(draws) for fold in _folds(labels, seed)]
    trainings = [_training(draws[draw], used, classes) for draw, (used, _) in parts]
    fitted = fit_together(trainings, [PENALTIES] * len(parts)) if parts else []
    right, tested = torch.zeros(len(draws), len(PENALTIES), dtype=torch.long), [0] * len(draws)
    for (draw, (_, held)), probes in zip(parts, fitted, strict=True):
        features, labels = (part[held.to(part.device)] for part in draws[draw])
        right[draw] += torch.stack([(probe.logits(features).argmax(1) == labels).sum() for probe in probes]).cpu()
        tested[draw] += len(labels)
    return [_best(own, count) for own, count in zip(right.tolist(), tested, strict=True)]


def _best(right: Sequence[int], tested: int) -> Chosen:
    if not tested:
        return Chosen(DEFAULT_PENALTY, float("nan"))
    best = max(range(len(PENALTIES)), key=lambda place: right[place])
    return Chosen(PENALTIES[best], right[best] / tested)


def _folds(labels: Int[Tensor, " n"], seed: int) -> list[tuple[Int[Tensor, " m"], Int[Tensor, " h"]]]:
    """Return used and held-out images, several times over; none where a class has a single image."""
    if len(labels) > FEW:
        held = held_out(len(labels), seed)
        return [((~held).nonzero()[:, 0], held.nonzero()[:, 0])]
    counts = torch.bincount(labels)
    folds = min(FOLDS, int(counts[counts > 0].min()))
    if folds < 2:
        return []
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32)
    parts = splitter.split(np.zeros(len(labels)), labels.cpu().numpy())
    return [(torch.from_numpy(used), torch.from_numpy(held)) for used, held in parts]


def _training(draw: Draw, rows: Int[Tensor, " m"] | None, classes: int) -> TrainingFeatures:
    features, labels = draw if rows is None else (part[rows.to(part.device)] for part in draw)
    return TrainingFeatures([features], labels, classes, features.device)
