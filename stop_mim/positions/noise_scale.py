"""Noise that depends on the image: a head on the context decides how much. Ours; the paper leaves it to future work."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stop_mim.errors import InputError


class NoiseScale(nn.Module):
    """s(x) of ψ̂ = ψ + s(x) A n: one positive number an image, from a linear head on the mean of its context features.

    The head compares the images of a batch: u = most^tanh(head - mean head) lies between 1/most and most, and s is u
    divided by its root mean square. The noise of a batch thus keeps its power, whatever the head learns, and no image gets
    less than 1/most² of its amplitude: the head can redistribute the noise but not silence it. It starts at s = 1.

    The batch is the part of it on one device; a single image has s = 1. No gradient reaches the features, so that the
    encoder does not learn to ask for less noise.
    """

    def __init__(self, context_dim: int, most: float = 2.0) -> None:
        super().__init__()
        if not (math.isfinite(most) and most >= 1):
            raise InputError(f"most is {most}: give a number of at least 1.")
        self.most = float(most)
        # A parameter and not a layer: it draws no random numbers and stays zero when a model's layers are initialised.
        self.weight = nn.Parameter(torch.zeros(1, context_dim))

    def forward(self, context: Tensor) -> Tensor:
        """Return s of every image, (images,), from its context features, (images, n, context_dim)."""
        if context.ndim != 3 or context.shape[-1] != self.weight.shape[1]:
            raise InputError(
                f"context has the shape {tuple(context.shape)}: give (images, tokens, {self.weight.shape[1]} features)."
            )
        scores = F.linear(context.detach().mean(dim=1), self.weight).float().squeeze(-1)
        # Relative to the mean: a common offset would saturate tanh, and the head would stop learning.
        scales = torch.exp(math.log(self.most) * torch.tanh(scores - scores.mean()))
        return scales / scales.square().mean().sqrt()

    def of_rows(self, context: Tensor | None, rows: int) -> Tensor:
        """Return s of the image of every row of indices, (rows, 1, 1); each image has the same number of consecutive rows."""
        if context is None:
            raise InputError(
                "context is None and the noise depends on the context: call positions(indices, context=features)."
            )
        if rows % len(context):
            raise InputError(
                f"indices have {rows} rows and the context {len(context)} images: give every image the same number of rows."
            )
        return self(context).repeat_interleave(rows // len(context))[:, None, None]

    def extra_repr(self) -> str:
        return f"context_dim={self.weight.shape[1]}, most={self.most:g}"
