"""How often the right class is among the best, and how far chance alone may move that number."""

import math

from jaxtyping import Float, Int
from torch import Tensor

# The 97.5th percentile of a normal distribution: 95% lie within so many standard deviations.
NORMAL_QUANTILE = 1.959964


def top_accuracy(scores: Float[Tensor, "n classes"], labels: Int[Tensor, " n"], k: int) -> float:
    """Part of the images whose class is among the k that score highest."""
    return (scores.topk(k, dim=1).indices == labels[:, None]).any(1).double().mean().item()


def accuracy_interval(percent: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of an accuracy in percent that was measured on so many images."""
    part, z2 = percent / 100, NORMAL_QUANTILE**2
    centre = (part + z2 / (2 * count)) / (1 + z2 / count)
    reach = math.sqrt(part * (1 - part) * z2 / count + (z2 / (2 * count)) ** 2) / (1 + z2 / count)
    return 100 * max(0.0, centre - reach), 100 * min(1.0, centre + reach)
