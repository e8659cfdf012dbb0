"""Few labels: L2-regularised logistic regression on frozen features of a part of the training set, over several draws."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from stop_mim.evaluation.accuracy import top_accuracy
from stop_mim.evaluation.linear import PENALTIES, Chosen, FitProgress, TrainingFeatures, choose_penalty

FOLDS = 5
# With more images than this, one held-out part tells as much as folds do.
FEW = 2000
# Where every class has a single image nothing can be held out.
DEFAULT_PENALTY = 1e-2


def choose_penalty_by_folds(
    features: Float[Tensor, "n dim"],
    labels: Int[Tensor, " n"],
    classes: int,
    seed: int = 0,
    penalties: Sequence[float] = PENALTIES,
) -> Chosen:
    """The penalty that does best over folds of these few images, each held out once; of equals, the strongest."""
    if len(labels) > FEW:
        return choose_penalty([features], labels, classes, features.device, True, penalties, seed)
    counts = torch.bincount(labels)
    folds = min(FOLDS, int(counts[counts > 0].min()))
    if folds < 2:
        return Chosen(DEFAULT_PENALTY, float("nan"))
    right = dict.fromkeys(penalties, 0.0)
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32)
    for used, held in splitter.split(np.zeros(len(labels)), labels.cpu().numpy()):
        inside, outside = torch.from_numpy(used).to(labels.device), torch.from_numpy(held).to(labels.device)
        training = TrainingFeatures([features[inside]], labels[inside], classes, features.device)
        for penalty, probe in zip(penalties, training.fit(penalties), strict=True):
            right[penalty] += probe.accuracy(features[outside], labels[outside]) * len(held)
    best = max(penalties, key=lambda penalty: right[penalty])
    return Chosen(best, right[best] / len(labels))


def low_shot(
    draws: Mapping[str, Sequence[tuple[Float[Tensor, "n dim"], Int[Tensor, " n"]]]],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
    classes: int,
    seed: int = 0,
    progress: FitProgress | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields for each amount of labels the mean and standard deviation of the test accuracy over its draws, in percent."""
    total, done = sum(len(parts) for parts in draws.values()), 0
    for amount, parts in draws.items():
        scores: dict[int, list[float]] = {1: [], 5: []}
        penalties = []
        for features, labels in parts:
            chosen = choose_penalty_by_folds(features, labels, classes, seed)
            training = TrainingFeatures([features], labels, classes, features.device)
            logits = training.fit([chosen.penalty])[0].logits(test_features)
            for k, values in scores.items():
                values.append(100 * top_accuracy(logits, test_labels, min(k, classes)))
            penalties.append(chosen.penalty)
            done += 1
            if progress is not None:
                progress(done, total)
        for k, values in scores.items():
            if k < classes:
                yield f"low-shot/{amount}/top{k}", float(np.mean(values))
                if len(parts) > 1:
                    yield f"low-shot/{amount}/top{k}_std", float(np.std(values, ddof=1))
        yield f"low-shot/{amount}/images", float(len(parts[0][1]))
        yield f"low-shot/{amount}/draws", float(len(parts))
        for draw, penalty in enumerate(penalties):
            yield f"low-shot/{amount}/penalty@{draw}", penalty
            yield f"low-shot/{amount}/top1@{draw}", scores[1][draw]
