"""Linear probe on frozen features: L2-regularised logistic regression, all its choices made on a part of the training set.

Features that do not fit into the device's memory are read again, chunk by chunk, for every step of the search.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        return [self.probe(one) for one in found]

    def inputs(self) -> Float[Tensor, "n k"]:
        """All features along the principal components, of a set in memory."""
        assert self.projected is not None
        return self.projected

    def probe(self, weights: Float[Tensor, "classes k_and_more"]) -> LinearProbe:
        """The probe of weights along the principal components, which come first, and of biases, which come last."""
        k = len(self.curvatures)
        return LinearProbe(self.mean, self.std, weights[:, :k] @ self.components.T, weights[:, -1])


@torch.no_grad()
def fit_together(
    trainings: Sequence[TrainingFeatures],
    penalties: Sequence[Sequence[float]],
    steps: int = STEPS,
    at_once: int | None = None,
) -> list[list[LinearProbe]]:
    """What `fit` finds for each of several small sets in memory and its penalties, equally many; all searched for at once.

    A GPU waits for the interpreter in each step of a small search: many searches in one wait no longer than a single one.
    On the CPU, which would only have more numbers to move, each is on its own unless `at_once` says otherwise.
    """
    widest = max(len(training.curvatures) for training in trainings)
    most_rows, classes, problems = max(one.count for one in trainings), trainings[0].classes, len(penalties[0])
    # The search remembers two points for each step of its history.
    numbers = problems * classes * (most_rows + 2 * HISTORY * (widest + 1))
    if at_once is None:
        at_once = 1 if trainings[0].device.type == "cpu" else max(1, LOGITS_AT_A_TIME // numbers)
    found: list[list[LinearProbe]] = []
    for start in range(0, len(trainings), at_once):
        part = slice(start, start + at_once)
        found += _fit_stacked(trainings[part], penalties[part], steps)
    return found


def _fit_stacked(
    trainings: Sequence[TrainingFeatures], penalties: Sequence[Sequence[float]], steps: int
) -> list[list[LinearProbe]]:
    if len(trainings) == 1 or any(training.projected is None for training in trainings):
        return [training.fit(own, steps) for training, own in zip(trainings, penalties, strict=True)]
    sets, problems, classes = len(trainings), len(penalties[0]), trainings[0].classes
    k, device = max(len(one.curvatures) for one in trainings), trainings[0].device
    inputs = pad_sequence([F.pad(one.inputs(), (0, k - len(one.curvatures))) for one in trainings], batch_first=True)
    labels = pad_sequence([torch.cat(one.labels) for one in trainings], batch_first=True)
    # A row that only fills up weighs nothing, and a component that only fills up stays at zero.
    shares = pad_sequence([inputs.new_full((one.count,), 1 / one.count) for one in trainings], batch_first=True)
    curvatures = pad_sequence([one.curvatures for one in trainings], batch_first=True, padding_value=1.0)
    strengths = torch.tensor(penalties, device=device)[..., None].expand(-1, -1, k)
    strengths = F.pad(strengths, (0, 1))[:, :, None]
    evenly = 1 / classes * (1 - 1 / classes)
    stretch = (evenly * F.pad(curvatures, (0, 1), value=1.0)[:, None, None] + strengths).rsqrt()
    index = labels[..., None, None].expand(-1, -1, problems, 1)
    weighed = shares[..., None, None]

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        weights = points.view(sets, problems, classes, k + 1) * stretch
        flat, biases = weights[..., :k].flatten(1, 2), weights[..., k].flatten(1)
        logits = torch.baddbmm(biases[:, None], inputs, flat.transpose(1, 2)).view(sets, -1, problems, classes)
        logs = logits.log_softmax(3)
        values = 0.5 * (strengths * weights.square()).sum((2, 3)) - (logs.gather(3, index) * weighed).sum((1, 3))
        slopes = logs.exp_().scatter_add_(3, index, logs.new_full(index.shape, -1.0)).mul_(weighed).flatten(2)
        along = torch.cat([slopes.transpose(1, 2) @ inputs, slopes.sum(1)[..., None]], 2)
        gradients = strengths * weights + along.view_as(weights)
        return values.flatten(), (gradients * stretch).view_as(points)

    start = torch.zeros(sets * problems, classes * (k + 1), device=device)
    found = minimise(objective, start, steps, HISTORY).view(sets, problems, classes, k + 1) * stretch
    return [[one.probe(weights) for weights in own] for one, own in zip(trainings, found, strict=True)]


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


def held_out(count: int, seed: int = 0) -> Bool[Tensor, " n"]:
    """Which of so many training images are kept back to choose by."""
    order = torch.randperm(count, generator=seeded_generator("cpu", seed, "held out"))
    held = torch.zeros(count, dtype=torch.bool)
    held[order[: max(1, min(MOST_HELD_OUT, int(count * HELD_OUT_PART)))]] = True
    return held


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
    held = held_out(len(labels), seed)
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
