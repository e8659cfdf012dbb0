"""L2-regularised logistic regression on frozen features: all penalties, or many small sets, are fitted at once.

Features that do not fit into the device's memory are read again, chunk by chunk, in every step of the search.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from sklearn.model_selection import StratifiedKFold
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stop_mim.data.stored import Progress
from stop_mim.evaluation.features import Chunks
from stop_mim.models.accuracy import top_accuracy, top_hits
from stop_mim.seeds import seeded_generator

# Penalties per image; scikit-learn's C is 1 / (penalty · images).
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
LOW_SHOT_PENALTIES = (10.0, 1.0, *PENALTIES)
# Where a class has a single image, nothing can be held out.
DEFAULT_PENALTY = 1e-2
HELD_OUT_FRACTION, MAX_HELD_OUT = 0.2, 50_000
# With more images than this, one held-out part is as good as folds.
FOLDS, MOST_FOLDED = 5, 2000
# After each round the search is preconditioned again; it ends when a round improves no loss by more than this part of it.
STEPS, STEPS_A_ROUND, HISTORY, IMPROVEMENT = 800, 50, 10, 1e-3
# Bounds memory; changes no result.
LOGITS_AT_A_TIME = 2**27
SUFFICIENT_DECREASE, SHORTENING, MOST_SHORTENINGS = 1e-4, 0.3, 8
# The relative error of a value in single precision.
ROUNDING = 2e-7
STALLED_STEPS = 3

Points = Float[Tensor, "problems dim"]
Objective = Callable[[Points], tuple[Float[Tensor, " problems"], Points]]
"""Returns value and gradient of each problem at its point."""
Draw = tuple[Float[Tensor, "_ dim"], Int[Tensor, " _"]]
"""Features of some images, and their labels."""


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of features that are standardised by the statistics of the training set."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def logits(self, features: Float[Tensor, "n dim"]) -> Float[Tensor, "n classes"]:
        """Return the scores of the classes."""
        return F.linear((features.to(self.mean) - self.mean) / self.std, self.weight, self.bias)


class TrainingFeatures:
    """Features and labels to fit probes to: centred, and standardised or scaled as a whole.

    Weights are searched along the principal components, see `fit_stacked`.
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
        self.variances, self.components = self._principal_components(only)
        self.projected = None if only is None else self._project(only)

    def _inputs(self, chunk: Tensor) -> Float[Tensor, "chunk dim"]:
        return (chunk.to(self.device, non_blocking=True).float() - self.mean) / self.std

    def _project(self, inputs: Float[Tensor, "n dim"]) -> Float[Tensor, "n k_and_one"]:
        # Ones for the bias come first.
        return F.pad(inputs @ self.components, (1, 0), value=1.0)

    def _principal_components(self, only: Tensor | None) -> tuple[Float[Tensor, " k"], Float[Tensor, "dim k"]]:
        """Return variances and directions, without directions of no variance, along which the optimum is zero."""
        if only is not None and only.shape[0] < only.shape[1]:
            # The smaller of the two Gram matrices has the same spectrum.
            variances, left = torch.linalg.eigh(only.double() @ only.double().T / self.count)
            directions = F.normalize(only.double().T @ left, dim=0)
        else:
            inputs = (only,) if only is not None else map(self._inputs, self.chunks)
            moments = sum((part.double().T @ part.double() for part in inputs), torch.zeros(1, device=self.device))
            variances, directions = torch.linalg.eigh(moments / self.count)
        kept = variances > 1e-9 * variances[-1].clamp(min=1e-30)
        kept[-1] = True
        return variances[kept].float(), directions[:, kept].float()

    def batches(self, rows: int) -> Iterator["Stacked"]:
        """Yield batches of this many rows, along the principal components, as a stack of one set."""
        chunks = self.chunks if self.projected is None else (self.projected,)
        for chunk, labels in zip(chunks, self.labels, strict=True):
            for part, part_labels in zip(chunk.split(rows), labels.split(rows), strict=True):
                inputs = part if self.projected is not None else self._project(self._inputs(part))
                yield inputs[None], part_labels[None], inputs.new_full((1, len(inputs)), 1 / self.count)

    def fit(self, penalties: Sequence[float], progress: Progress | None = None) -> list[LinearProbe]:
        """Return, for each penalty, the probe that minimises cross-entropy + penalty · ‖weight‖² / 2."""
        return fit_stacked([self], [penalties], progress)[0]

    def probe(self, weights: Float[Tensor, "classes one_and_more"]) -> LinearProbe:
        """Return the probe of weights along the principal components, which follow the biases."""
        along = weights[:, 1 : 1 + len(self.variances)]
        return LinearProbe(self.mean, self.std, along @ self.components.T, weights[:, 0])


def fit_together(
    trainings: Sequence[TrainingFeatures], penalties: Sequence[Sequence[float]]
) -> list[list[LinearProbe]]:
    """Fit several small sets, each with its penalties; every set has the same number of them.

    On a GPU, small sets are fitted in one search: each step of a small search waits for the interpreter, and many in one
    wait no longer than a single one. On the CPU each set is fitted on its own.
    """
    at_once = 1
    if trainings[0].device.type != "cpu" and all(training.projected is not None for training in trainings):
        widest, most_rows = max(len(one.variances) for one in trainings), max(one.count for one in trainings)
        # The search keeps two points for each step of its history.
        numbers = len(penalties[0]) * trainings[0].classes * (most_rows + 2 * HISTORY * (widest + 1))
        at_once = max(1, LOGITS_AT_A_TIME // numbers)
    parts = [slice(start, start + at_once) for start in range(0, len(trainings), at_once)]
    return [probes for part in parts for probes in fit_stacked(trainings[part], penalties[part])]


Stacked = tuple[Float[Tensor, "sets rows k_and_one"], Int[Tensor, "sets rows"], Float[Tensor, "sets rows"]]
"""Images of several sets along their principal components, their labels, and the weight of each image in its set's loss."""


@torch.no_grad()
def fit_stacked(
    trainings: Sequence[TrainingFeatures], penalties: Sequence[Sequence[float]], progress: Progress | None = None
) -> list[list[LinearProbe]]:
    """Fit sets in one search; only a set alone may be larger than the memory.

    The search is preconditioned: it runs along the principal components, each scaled so that the loss is about equally
    curved along all of them. A weak penalty makes probabilities certain, and the loss flatter than at the start: the scale is
    therefore computed again after each round of steps, at the current point.
    """
    sets, problems, classes = len(trainings), len(penalties[0]), trainings[0].classes
    variances = pad_sequence([one.variances for one in trainings], batch_first=True, padding_value=1.0)
    # The bias is one more component, with variance 1 and no penalty; components of padding stay at zero.
    variances = F.pad(variances, (1, 0), value=1.0)[:, None, None]
    strengths = torch.tensor(penalties, device=variances.device)[:, :, None, None] * torch.ones_like(variances)
    strengths[..., 0] = 0
    batches = _stack(trainings, variances.shape[-1], max(1, LOGITS_AT_A_TIME // (problems * classes)))

    def logits(weights: Tensor, inputs: Tensor) -> Float[Tensor, "sets rows problems classes"]:
        return (inputs @ weights.flatten(1, 2).mT).unflatten(2, (problems, classes))

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        weights = points.view_as(found) * stretch
        values = 0.5 * (strengths * weights.square()).sum((2, 3))
        gradients = strengths * weights
        for inputs, labels, shares in batches():
            logs = logits(weights, inputs).log_softmax(3)
            index, shares = labels[..., None, None].expand(-1, -1, problems, 1), shares[..., None, None]
            values = values - (logs.gather(3, index) * shares).sum((1, 3))
            slopes = logs.exp_().scatter_add_(3, index, logs.new_full(index.shape, -1.0)).mul_(shares)
            gradients = gradients + (slopes.flatten(2).mT @ inputs).view_as(weights)
        return values.flatten(), (gradients * stretch).view_as(points)

    def spread() -> Float[Tensor, "sets problems 1 1"]:
        """Return the mean of p (1 - p) over images and classes."""
        certain = strengths.new_zeros(sets, problems)
        for inputs, _, shares in batches():
            certain += (logits(found, inputs).softmax(3).square_().sum(3) * shares[..., None]).sum(1)
        return ((1 - certain).clamp(min=0) / classes)[..., None, None]

    def tick(done: int, step: int) -> None:
        if progress is not None:
            progress(done + step, STEPS)

    found = torch.zeros(sets, problems, classes, variances.shape[-1], device=variances.device)
    before = torch.full((sets * problems,), torch.inf, device=variances.device)
    for done in range(0, STEPS, STEPS_A_ROUND):
        stretch = (spread() * variances + strengths).clamp(min=1e-12).rsqrt()
        start = (found / stretch).view(sets * problems, -1)
        points, values = minimise(objective, start, STEPS_A_ROUND, partial(tick, done))
        found = points.view_as(found) * stretch
        if bool((before - values <= IMPROVEMENT * values).all()):
            break
        before = values
    tick(STEPS, 0)
    return [[one.probe(weights) for weights in own] for one, own in zip(trainings, found, strict=True)]


def _stack(trainings: Sequence[TrainingFeatures], width: int, rows: int) -> Callable[[], Iterable[Stacked]]:
    if len(trainings) == 1:
        return partial(trainings[0].batches, rows)
    projected = [one.projected for one in trainings if one.projected is not None]
    inputs = pad_sequence([F.pad(one, (0, width - one.shape[1])) for one in projected], batch_first=True)
    labels = pad_sequence([torch.cat(one.labels) for one in trainings], batch_first=True)
    # Rows of padding have no part in the loss.
    shares = pad_sequence([inputs.new_full((one.count,), 1 / one.count) for one in trainings], batch_first=True)
    return lambda: [(inputs, labels, shares)]


def _statistics(chunks: Chunks, device: torch.device) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    count = sum(len(chunk) for chunk in chunks)
    mean = sum((chunk.to(device).double().sum(0) for chunk in chunks), torch.zeros(1, device=device)) / count
    squares = sum(
        ((chunk.to(device).double() - mean).square().sum(0) for chunk in chunks), torch.zeros(1, device=device)
    )
    return mean.float(), (squares / count).sqrt().float()


@dataclass(frozen=True)
class Chosen:
    """A penalty, and the accuracy in percent on held-out training images that it was chosen by."""

    penalty: float
    held_out: float


def held_out(count: int, seed: int) -> Bool[Tensor, " n"]:
    """Return which of `count` training images are held out to choose by."""
    order = torch.randperm(count, generator=seeded_generator("cpu", seed, "held out"))
    held = torch.zeros(count, dtype=torch.bool)
    held[order[: max(1, min(MAX_HELD_OUT, int(count * HELD_OUT_FRACTION)))]] = True
    return held


def choose_penalty(
    chunks: Chunks,
    labels: Int[Tensor, " n"],
    classes: int,
    device: torch.device,
    standardise: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Chosen:
    """Return the penalty with the best accuracy on a held-out part of the images; the strongest of several best."""
    held = held_out(len(labels), seed)
    labels = labels.cpu()
    parts = held.split([len(chunk) for chunk in chunks])
    used = [chunk[~part.to(chunk.device)] for chunk, part in zip(chunks, parts, strict=True)]
    training = TrainingFeatures(used, labels[~held], classes, device, standardise)
    kept = torch.cat([chunk[part.to(chunk.device)].to(device) for chunk, part in zip(chunks, parts, strict=True)])
    probes = zip(PENALTIES, training.fit(PENALTIES, progress), strict=True)
    truth = labels[held].to(device)
    return _best(Chosen(penalty, top_accuracy(probe.logits(kept.float()), truth)) for penalty, probe in probes)


def choose_penalties(draws: Sequence[Draw], classes: int, seed: int) -> list[Chosen]:
    """Return, for each draw, the penalty with the best accuracy over folds of its images; the strongest of several best."""
    parts = [(draw, fold) for draw, (_, labels) in enumerate(draws) for fold in _folds(labels, seed)]
    used = [_rows(draws[draw], rows) for draw, (rows, _) in parts]
    trainings = [TrainingFeatures([features], labels, classes, features.device) for features, labels in used]
    fitted = fit_together(trainings, [LOW_SHOT_PENALTIES] * len(parts)) if parts else []
    right, tested = torch.zeros(len(draws), len(LOW_SHOT_PENALTIES), dtype=torch.long), [0] * len(draws)
    for (draw, (_, rows)), probes in zip(parts, fitted, strict=True):
        features, labels = _rows(draws[draw], rows)
        right[draw] += torch.stack([top_hits(probe.logits(features), labels, [1]).sum() for probe in probes]).cpu()
        tested[draw] += len(labels)
    return [
        _best(Chosen(penalty, 100 * hits / count) for penalty, hits in zip(LOW_SHOT_PENALTIES, own, strict=True))
        if count
        else Chosen(DEFAULT_PENALTY, math.nan)
        for own, count in zip(right.tolist(), tested, strict=True)
    ]


def _best(tried: Iterable[Chosen]) -> Chosen:
    # The first of several best: the strongest penalty.
    return max(tried, key=lambda one: one.held_out)


def _rows(draw: Draw, rows: Int[Tensor, " m"]) -> Draw:
    features, labels = draw
    return features[rows.to(features.device)], labels[rows.to(labels.device)]


def _folds(labels: Int[Tensor, " n"], seed: int) -> list[tuple[Int[Tensor, " m"], Int[Tensor, " h"]]]:
    """Return pairs of used and held-out images; no pair where a class has a single image."""
    if len(labels) > MOST_FOLDED:
        held = held_out(len(labels), seed)
        return [((~held).nonzero()[:, 0], held.nonzero()[:, 0])]
    counts = torch.bincount(labels)
    folds = min(FOLDS, int(counts[counts > 0].min()))
    if folds < 2:
        return []
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32)
    parts = splitter.split(np.zeros(len(labels)), labels.cpu().numpy())
    return [(torch.from_numpy(used), torch.from_numpy(held)) for used, held in parts]


def minimise(
    objective: Objective, start: Points, steps: int, progress: Callable[[int], None]
) -> tuple[Points, Float[Tensor, " problems"]]:
    """Minimise many small problems at once by L-BFGS; return the lowest point found of each, and its value.

    All take a step together, with one device synchronisation per step: torch's own solves one problem, and synchronises
    dozens of times per step. A problem whose step was too long tries a shorter one while the others go on. The search
    stops early when none of them improves.
    """
    point, (value, gradient) = start, objective(start)
    memory = _Memory(start)
    length = 1 / gradient.abs().sum(1).clamp(min=1.0)
    failed, gained_nothing = torch.zeros_like(value), torch.zeros_like(value)
    for step in range(steps):
        direction = memory.direction(gradient)
        slope = (gradient * direction).sum(1)
        uphill = slope >= 0
        direction = torch.where(uphill[:, None], -gradient, direction)
        slope = torch.where(uphill, -gradient.square().sum(1), slope)
        moved = point + length[:, None] * direction
        new_value, new_gradient = objective(moved)
        lower = new_value <= value + SUFFICIENT_DECREASE * length * slope + ROUNDING * value.abs()
        memory.add(moved - point, new_gradient - gradient, lower)
        nothing = value - new_value <= ROUNDING * value.abs()
        gained_nothing = torch.where(lower, torch.where(nothing, gained_nothing + 1, 0.0), gained_nothing)
        failed = torch.where(lower, 0.0, failed + 1)
        length = torch.where(lower, 1.0, SHORTENING * length)
        point = torch.where(lower[:, None], moved, point)
        gradient = torch.where(lower[:, None], new_gradient, gradient)
        value = torch.where(lower, new_value, value)
        progress(step + 1)
        if bool(((failed >= MOST_SHORTENINGS) | (gained_nothing >= STALLED_STEPS)).all()):
            break
    return point, value


class _Memory:
    """The last accepted moves and changes of gradient of every problem, the newest last."""

    def __init__(self, like: Points) -> None:
        self.moves = like.new_zeros(HISTORY, *like.shape)
        self.changes = like.new_zeros(HISTORY, *like.shape)
        # One over the curvature along a move; zero where there is no move.
        self.inverses = like.new_zeros(HISTORY, len(like))
        self.scale = like.new_ones(len(like))

    def add(self, move: Points, change: Points, accepted: Bool[Tensor, " problems"]) -> None:
        product, square = (move * change).sum(1), change.square().sum(1)
        usable = accepted & (product > 1e-10 * square) & (square > 0)
        self.scale = torch.where(usable, product / torch.where(usable, square, 1.0), self.scale)
        inverse = 1 / torch.where(usable, product, 1.0)
        for kept, newest in ((self.moves, move), (self.changes, change), (self.inverses, inverse)):
            chosen = usable.view(-1, *[1] * (newest.dim() - 1))
            # In place, entry by entry: with many classes a second copy would not fit into memory.
            for entry, follower in zip(kept, [*kept[1:], newest], strict=True):
                torch.where(chosen, follower, entry, out=entry)

    def direction(self, gradient: Points) -> Points:
        """Return minus the gradient times the estimated inverse Hessian."""
        result, parts = gradient, []
        remembered = list(zip(self.moves, self.changes, self.inverses, strict=True))
        for move, change, inverse in reversed(remembered):
            part = inverse * (move * result).sum(1)
            result = result - part[:, None] * change
            parts.append(part)
        result = self.scale[:, None] * result
        for (move, change, inverse), part in zip(remembered, reversed(parts), strict=True):
            other = inverse * (change * result).sum(1)
            result = result + (part - other)[:, None] * move
        return -result
