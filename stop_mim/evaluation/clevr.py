"""CLEVR/Count and CLEVR/Dist as classes: how many objects there are, and how far the nearest one is."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

FEWEST_OBJECTS = 3
DISTANCE_EDGES = (8.0, 8.5, 9.0, 9.5, 10.0)


def count_classes(counts: np.ndarray) -> Int[Tensor, " n"]:
    """3 to 10 objects as classes 0 to 7."""
    return torch.as_tensor(counts, dtype=torch.long) - FEWEST_OBJECTS


def distance_classes(distances: np.ndarray) -> Int[Tensor, " n"]:
    """The distance of the nearest object in six bins, each with its lower edge."""
    return torch.as_tensor(np.digitize(distances, DISTANCE_EDGES), dtype=torch.long)
