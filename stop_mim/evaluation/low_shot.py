"""Few labels: L2-regularised logistic regression on frozen features of a part of the training set, over several draws."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from stop_mim.evaluation.accuracy import top_accuracy
from stop_mim.evaluation.linear import PENALTIES, Chosen, FitProgress, TrainingFeatures, fit_together, held_out

FOLDS = 5
# With more images than this, one held-out part tells as much as folds do.
FEW = 2000
# Where every class has a single image nothing can be held out.
DEFAULT_PENALTY = 1e-2

Draw = tuple[Float[Tensor, "_ dim"], Int[Tensor, " _"]]
"""Features of some images, and their labels."""


def choose_penalties(
    draws: Sequence[Draw], classes: int, seed: int = 0, penalties: Sequence[float] = PENALTIES
) -> list[Chosen]:
    """For each draw the penalty that does best over folds of its few images, each held out once; of equals, the strongest."""
    parts = [(draw, fold) for draw, (_, labels) in enumerate(draws) for fold in _folds(labels, seed)]
    if not parts:
        return [Chosen(DEFAULT_PENALTY, float("nan"))] * len(draws)
    trainings = [_training(draws[draw], used, classes) for draw, (used, _) in parts]
    right, tested = torch.zeros(len(draws), len(penalties), dtype=torch.long), [0] * len(draws)
    for (draw, (_, held)), probes in zip(parts, fit_together(trainings, [penalties] * len(parts)), strict=True):
        features, labels = (part[held.to(part.device)] for part in draws[draw])
        right[draw] += torch.stack([(probe.logits(features).argmax(1) == labels).sum() for probe in probes]).cpu()
        tested[draw] += len(labels)
    return [_best(own, penalties, count) for own, count in zip(right.tolist(), tested, strict=True)]


def _best(right: Sequence[int], penalties: Sequence[float], tested: int) -> Chosen:
    if not tested:
        return Chosen(DEFAULT_PENALTY, float("nan"))
    best = max(range(len(penalties)), key=lambda place: right[place])
    return Chosen(penalties[best], right[best] / tested)


def _folds(labels: Int[Tensor, " n"], seed: int) -> list[tuple[Int[Tensor, " m"], Int[Tensor, " h"]]]:
    """Images to learn from and images held out, several times over; none where a class has a single image."""
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


def choose_penalty_by_folds(
    features: Float[Tensor, "n dim"],
    labels: Int[Tensor, " n"],
    classes: int,
    seed: int = 0,
    penalties: Sequence[float] = PENALTIES,
) -> Chosen:
    """The same for one draw."""
    return choose_penalties([(features, labels)], classes, seed, penalties)[0]


def low_shot(
    draws: Mapping[str, Sequence[Draw]],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
    classes: int,
    seed: int = 0,
    progress: FitProgress | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields for each amount of labels the mean and standard deviation of the test accuracy over its draws, in percent.

    The draws of an amount are fitted as one: first all their folds, then all draws with the penalties that these chose.
    """
    total, done = sum(len(parts) for parts in draws.values()), 0
    for amount, parts in draws.items():
        chosen = choose_penalties(parts, classes, seed)
        trainings = [_training(part, None, classes) for part in parts]
        probes = [probe for (probe,) in fit_together(trainings, [[one.penalty] for one in chosen])]
        scores: dict[int, list[float]] = {1: [], 5: []}
        for probe in probes:
            logits = probe.logits(test_features)
            for k, values in scores.items():
                values.append(100 * top_accuracy(logits, test_labels, min(k, classes)))
        done += len(parts)
        if progress is not None:
            progress(done, total)
        for k, values in scores.items():
            if k < classes:
                yield f"low-shot/{amount}/top{k}", float(np.mean(values))
                if len(parts) > 1:
                    yield f"low-shot/{amount}/top{k}_std", float(np.std(values, ddof=1))
        yield f"low-shot/{amount}/images", float(len(parts[0][1]))
        yield f"low-shot/{amount}/draws", float(len(parts))
        for draw, one in enumerate(chosen):
            yield f"low-shot/{amount}/penalty@{draw}", one.penalty
            yield f"low-shot/{amount}/top1@{draw}", scores[1][draw]
