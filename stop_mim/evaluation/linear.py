"""Linear probe on frozen features: L2-regularised logistic regression, all its choices made on a part of the training set.

Features that do not fit into the device's memory are read again, chunk by chunk, for every step of the search.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.evaluation.accuracy import top_accuracy
from stop_mim.evaluation.minimiser import minimise
from stop_mim.seeds import seeded_generator

# Penalties per image; scikit-learn's C is 1 / (penalty · images).
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
HELD_OUT_PART, MOST_HELD_OUT = 0.2, 50_000
STEPS, HISTORY = 200, 10
# It bounds memory and changes no result.
LOGITS_AT_A_TIME = 2**27

Chunks = Sequence[Float[Tensor, "_ _"]]
FitProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class LinearProbe:
    """A standardisation by the training set's statistics and a linear classifier."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def logits(self, features: Float[Tensor, "n dim"]) -> Float[Tensor, "n classes"]:
        """Scores of the classes."""
        return F.linear((features.to(self.mean) - self.mean) / self.std, self.weight, self.bias)

    def accuracy(self, features: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]) -> float:
        """Part of the images whose class has the highest score."""
        return top_accuracy(self.logits(features), labels, 1)


class TrainingFeatures:
    """Features and labels to fit probes to: standardised, or scaled as a whole; centred, which the free bias allows.

    The search goes along the principal components, each stretched until the loss is about equally curved along all of
    them: the optimum is the same, and is found in tens of steps instead of hundreds.
    """

    def __init__(
        self, chunks: Chunks, labels: Int[Tensor, " n"], classes: int, device: torch.device, standardise: bool = True
    ) -> None:
        self.classes, self.device, self.count, self.chunks = classes, device, len(labels), chunks
        self.mean, self.std = _statistics(chunks, device)
        if not standardise:
            self.std = self.std.square().mean().sqrt().expand_as(self.std).clone()
        self.std = self.std.clamp(min=1e-6)
        self.labels = labels.to(device).split([len(chunk) for chunk in chunks])
        only = self._inputs(chunks[0]) if len(chunks) == 1 else None
        self.curvatures, self.components = self._principal_components(only)
        self.projected = None if only is None else only @ self.components

    def _inputs(self, chunk: Tensor) -> Float[Tensor, "chunk dim"]:
        return (chunk.to(self.device, non_blocking=True).float() - self.mean) / self.std

    def _principal_components(self, only: Tensor | None) -> tuple[Float[Tensor, " k"], Float[Tensor, "dim k"]]:
        """Variances and directions; those without variance, in which the optimum has no part, are left out."""
        if only is not None and only.shape[0] < only.shape[1]:
            # The smaller of the two products has the same spectrum.
            variances, left = torch.linalg.eigh(only.double() @ only.double().T / self.count)
            directions = F.normalize(only.double().T @ left, dim=0)
        else:
            inputs = (only,) if only is not None else map(self._inputs, self.chunks)
            moments = sum((part.double().T @ part.double() for part in inputs), torch.zeros(1, device=self.device))
            variances, directions = torch.linalg.eigh(moments / self.count)
        kept = variances > 1e-9 * variances[-1].clamp(min=1e-30)
        kept[-1] = True
        return variances[kept].float(), directions[:, kept].float()

    def _batches(self, rows: int) -> Iterator[tuple[Float[Tensor, "rows k"], Int[Tensor, " rows"]]]:
        chunks = self.chunks if self.projected is None else (self.projected,)
        for chunk, labels in zip(chunks, self.labels, strict=True):
            for part, part_labels in zip(chunk.split(rows), labels.split(rows), strict=True):
                yield part if self.projected is not None else self._inputs(part) @ self.components, part_labels

    @torch.no_grad()
    def fit(self, penalties: Sequence[float], steps: int = STEPS, tick: FitProgress | None = None) -> list[LinearProbe]:
        """For each penalty the probe that minimises cross-entropy + penalty · ‖weight‖² / 2; all are searched for at once."""
        problems, classes, k = len(penalties), self.classes, len(self.curvatures)
        strengths = torch.tensor(penalties, device=self.device)[:, None].expand(-1, k)
        # The bias is one more component, of variance 1 and without penalty.
        strengths = F.pad(strengths, (0, 1))[:, None]
        evenly = 1 / classes * (1 - 1 / classes)
        stretch = (evenly * F.pad(self.curvatures, (0, 1), value=1.0) + strengths).rsqrt()
        rows = max(1, LOGITS_AT_A_TIME // (problems * classes))

        def objective(points: Tensor) -> tuple[Tensor, Tensor]:
            weights = points.view(problems, classes, k + 1) * stretch
            values = 0.5 * (strengths * weights.square()).sum((1, 2))
            gradients = strengths * weights
            flat, biases = weights[..., :k].reshape(-1, k), weights[..., k].reshape(-1)
            for inputs, labels in self._batches(rows):
                logits = torch.addmm(biases, inputs, flat.T).view(len(inputs), problems, classes)
                index = labels[:, None, None].expand(-1, problems, 1)
                logs = logits.log_softmax(2)
                values = values - logs.gather(2, index).sum((0, 2)) / self.count
                slopes = logs.exp_().scatter_add_(2, index, logs.new_full(index.shape, -1.0)).flatten(1) / self.count
                along = torch.cat([slopes.T @ inputs, slopes.sum(0)[:, None]], 1)
                gradients = gradients + along.view(problems, classes, k + 1)
            return values, (gradients * stretch).flatten(1)

        start = torch.zeros(problems, classes * (k + 1), device=self.device)
        found = minimise(objective, start, steps, HISTORY, tick).view(problems, classes, k + 1) * stretch
        return [LinearProbe(self.mean, self.std, one[:, :k] @ self.components.T, one[:, k]) for one in found]


def _statistics(chunks: Chunks, device: torch.device) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    count = sum(len(chunk) for chunk in chunks)
    mean = sum((chunk.to(device).double().sum(0) for chunk in chunks), torch.zeros(1, device=device)) / count
    squares = sum(
        ((chunk.to(device).double() - mean).square().sum(0) for chunk in chunks), torch.zeros(1, device=device)
    )
    return mean.float(), (squares / count).sqrt().float()


def fit_linear_probe(
    features: Float[Tensor, "n dim"], labels: Int[Tensor, " n"], penalty: float, classes: int, standardise: bool = True
) -> LinearProbe:
    """A probe of features in memory, with a given penalty."""
    training = TrainingFeatures([features], labels, classes, features.device, standardise)
    return training.fit([penalty])[0]


@dataclass(frozen=True)
class Chosen:
    """A penalty, and the accuracy on held-out training images that it was chosen for."""

    penalty: float
    held_out: float


def choose_penalty(
    chunks: Chunks,
    labels: Int[Tensor, " n"],
    classes: int,
    device: torch.device,
    standardise: bool = True,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
    done: FitProgress | None = None,
) -> Chosen:
    """The penalty that does best on a held-out part of these images; of equals, the strongest."""
    order = torch.randperm(len(labels), generator=seeded_generator("cpu", seed, "held out"))
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[order[: max(1, min(MOST_HELD_OUT, int(len(order) * HELD_OUT_PART)))]] = True
    labels = labels.cpu()
    parts = held.split([len(chunk) for chunk in chunks])
    used = [chunk[~part.to(chunk.device)] for chunk, part in zip(chunks, parts, strict=True)]
    training = TrainingFeatures(used, labels[~held], classes, device, standardise)
    kept = torch.cat([chunk[part.to(chunk.device)].to(device) for chunk, part in zip(chunks, parts, strict=True)])
    best = Chosen(penalties[0], -1.0)
    for penalty, probe in zip(penalties, training.fit(penalties, tick=done), strict=True):
        accuracy = probe.accuracy(kept.float(), labels[held].to(device))
        best = Chosen(penalty, accuracy) if accuracy > best.held_out else best
    return best


def linear_probe(
    train: Mapping[str, Chunks],
    train_labels: Int[Tensor, " n"],
    test: Mapping[str, Chunks],
    test_labels: Int[Tensor, " m"],
    classes: int,
    device: torch.device,
    standardise: Sequence[bool] = (True, False),
    seed: int = 0,
    progress: FitProgress | None = None,
) -> Iterator[tuple[str, float]]:
    """Yields the scores of a probe of each kind of features, with standardisation (+bn) and without, then of the best.

    The best is the one that did best on held-out training images: the test set decides nothing.
    """
    variants = [(name, scaled) for name in train for scaled in standardise]
    best_held_out, best_scores = -1.0, {}
    for number, (name, scaled) in enumerate(variants):
        searches = 2 * number

        def tick(step: int, steps: int) -> None:
            if progress is not None:
                progress(searches * steps + step, 2 * len(variants) * steps)  # noqa: B023 - called before the next one

        chosen = choose_penalty(train[name], train_labels, classes, device, scaled, PENALTIES, seed, tick)
        training = TrainingFeatures(train[name], train_labels, classes, device, scaled)
        searches += 1
        (probe,) = training.fit([chosen.penalty], tick=tick)
        logits = torch.cat([probe.logits(chunk.to(device)) for chunk in test[name]])
        scores = {f"top{k}": 100 * top_accuracy(logits, test_labels.to(device), k) for k in (1, 5) if k < classes}
        scores |= {"penalty": chosen.penalty, "held_out": 100 * chosen.held_out}
        for score, value in scores.items():
            yield f"linear/{name}{'+bn' if scaled else ''}/{score}", value
        if chosen.held_out > best_held_out:
            best_held_out, best_scores = chosen.held_out, scores
    if progress is not None:
        progress(2 * len(variants) * STEPS, 2 * len(variants) * STEPS)
    for score, value in best_scores.items():
        yield f"linear/{score}", value
