"""How much noise each image gets, read from its context: ours, not the paper's, which leaves it to future work."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NoiseScale(nn.Module):
    """s(x) of ψ̂ = ψ + s(x) A n: one positive number an image, from a linear head on the mean of its context's features.

    The head compares the images of a batch: u = most^tanh(head - mean head) is between 1/most and most, and s is u over its
    root mean square. So the noise of a batch has the power that it has without the head, whatever the head learns, and no
    image gets less than 1/most² of it in amplitude: it can be dealt out, and not silenced. The head starts at s = 1.

    The batch is what one device sees at a time; alone in it, an image has s = 1. The features are read without a gradient,
    so that the encoder is not taught to ask for less noise.
    """

    def __init__(self, context_dim: int, most: float = 2.0) -> None:
        super().__init__()
        if not (math.isfinite(most) and most >= 1):
            raise ValueError(f"most is {most}: give a finite number that is at least 1.")
        self.most = float(most)
        # Not a layer: it must draw no random numbers, and keep its zeros when the layers of a model are initialised.
        self.weight = nn.Parameter(torch.zeros(1, context_dim))

    def forward(self, context: Tensor) -> Tensor:
        """s of every image, (images,), from the features of its context, (images, n, context_dim)."""
        if context.ndim != 3 or context.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"context has the shape {tuple(context.shape)}: give (images, tokens, {self.weight.shape[1]} features)."
            )
        scores = F.linear(context.detach().mean(dim=1), self.weight).float().squeeze(-1)
        # What all images have in common must not push all of them to the same limit, where the head would learn no more.
        scales = torch.exp(math.log(self.most) * torch.tanh(scores - scores.mean()))
        return scales / scales.square().mean().sqrt()

    def extra_repr(self) -> str:
        return f"context_dim={self.weight.shape[1]}, most={self.most:g}"
