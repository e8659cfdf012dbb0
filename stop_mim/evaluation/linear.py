"""Linear probe on frozen features: L2-regularised logistic regression, its strength chosen on a part of the training set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.seeds import seeded_generator

# Penalties per image; scikit-learn's C is 1 / (penalty · images).
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
HELD_OUT_PART = 0.2


@dataclass(frozen=True)
class LinearProbe:
    """A standardisation by the training set's statistics and a linear classifier."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def logits(self, features: Float[Tensor, "n dim"]) -> Float[Tensor, "n classes"]:
        """Scores of the classes."""
        return F.linear((features - self.mean) / self.std, self.weight, self.bias)

    def accuracy(self, features: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]) -> float:
        """Part of the images whose class has the highest score."""
        return (self.logits(features).argmax(1) == labels).float().mean().item()


def fit_linear_probe(
    features: Float[Tensor, "n dim"], labels: Int[Tensor, " n"], penalty: float, classes: int, steps: int = 300
) -> LinearProbe:
    """Minimise cross-entropy + penalty · ‖weight‖² / 2 by L-BFGS on all features at once."""
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    inputs = (features - mean) / std
    # The optimum lies in the span of the training images: with more features than images, that is the smaller space.
    span = torch.linalg.qr(inputs.T).Q if inputs.shape[1] > inputs.shape[0] else None
    inputs = inputs if span is None else inputs @ span
    weight = torch.zeros(classes, inputs.shape[1], device=inputs.device, requires_grad=True)
    bias = torch.zeros(classes, device=inputs.device, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, history_size=20, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + 0.5 * penalty * weight.square().sum()
        loss.backward()
        return loss.item()

    with torch.enable_grad():
        optimiser.step(closure)
    found = weight.detach() if span is None else weight.detach() @ span.T
    return LinearProbe(mean, std, found, bias.detach())


def choose_penalty(
    features: Float[Tensor, "n dim"],
    labels: Int[Tensor, " n"],
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> float:
    """The penalty that does best on a held-out part of these images."""
    generator = seeded_generator("cpu", seed, "held out")
    order = torch.randperm(len(features), generator=generator).to(features.device)
    held_out, used = order.tensor_split([max(1, int(len(order) * HELD_OUT_PART))])
    scores = {
        penalty: fit_linear_probe(features[used], labels[used], penalty, classes).accuracy(
            features[held_out], labels[held_out]
        )
        for penalty in penalties
    }
    return max(scores, key=lambda penalty: scores[penalty])


def linear_probe(
    train_features: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
    seed: int = 0,
) -> Iterator[tuple[str, float]]:
    """Yields the test accuracy in percent and the penalty; the test set decides nothing."""
    classes = int(train_labels.max()) + 1
    penalty = choose_penalty(train_features, train_labels, classes, seed=seed)
    probe = fit_linear_probe(train_features, train_labels, penalty, classes)
    yield "linear/top1", 100 * probe.accuracy(test_features, test_labels)
    yield "linear/penalty", penalty
