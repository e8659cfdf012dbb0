"""Probes of frozen features: nearest neighbours, logistic regression, and the same with few labels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from stop_mim.data.stored import Progress
from stop_mim.evaluation.features import Chunks
from stop_mim.evaluation.logistic import (
    PENALTIES,
    STEPS,
    Chosen,
    TrainingFeatures,
    choose_penalty,
    fit_together,
    held_out,
    top_accuracy,
)
from stop_mim.models.neighbours import TEMPERATURE, nearest, votes
from stop_mim.results import Scalar, Score, accuracy

QUERIES_AT_A_TIME = 2048
# The headline is of this number of neighbours, or of the nearest one that is asked for.
USUAL_NEIGHBOURS = 20
LOW_SHOT_PENALTIES = (10.0, 1.0, *PENALTIES)
FOLDS = 5
# With more images than this, one held-out part is as good as folds.
FEW = 2000
# Where a class has a single image, nothing can be held out.
DEFAULT_PENALTY = 1e-2

Draw = tuple[Float[Tensor, "_ dim"], Int[Tensor, " _"]]
"""Features of some images, and their labels."""


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
    """Return, for each draw, the penalty with the best accuracy over folds of its images; the strongest of several best."""
    parts = [(draw, fold) for draw, (_, labels) in enumerate(draws) for fold in _folds(labels, seed)]
    trainings = [_training(draws[draw], used, classes) for draw, (used, _) in parts]
    fitted = fit_together(trainings, [LOW_SHOT_PENALTIES] * len(parts)) if parts else []
    right, tested = torch.zeros(len(draws), len(LOW_SHOT_PENALTIES), dtype=torch.long), [0] * len(draws)
    for (draw, (_, held)), probes in zip(parts, fitted, strict=True):
        features, labels = (part[held.to(part.device)] for part in draws[draw])
        right[draw] += torch.stack([(probe.logits(features).argmax(1) == labels).sum() for probe in probes]).cpu()
        tested[draw] += len(labels)
    return [_best(own, count) for own, count in zip(right.tolist(), tested, strict=True)]


def _best(right: Sequence[int], tested: int) -> Chosen:
    if not tested:
        return Chosen(DEFAULT_PENALTY, float("nan"))
    best = max(range(len(LOW_SHOT_PENALTIES)), key=lambda place: right[place])
    return Chosen(LOW_SHOT_PENALTIES[best], right[best] / tested)


def _folds(labels: Int[Tensor, " n"], seed: int) -> list[tuple[Int[Tensor, " m"], Int[Tensor, " h"]]]:
    """Return pairs of used and held-out images; no pair where a class has a single image."""
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
