"""How the loss of a linear head is curved along the features: by it, SGD goes equally fast along all of them.

Features of a network are correlated: along most of their principal components they vary little, and plain SGD, whose
learning rate the strongest component limits, hardly moves there.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

# Of the mean of all components: it bounds the steps along those in which the features do not vary at all.
DAMPING = 1e-4


def sum_of_products(features: Float[Tensor, "batch dim"]) -> Float64[Tensor, "dim_and_one dim_and_one"]:
    """Products of all pairs of features, and of each with one, summed over the images; the last is their number."""
    extended = F.pad(features.double(), (0, 1), value=1.0)
    return extended.T @ extended


def inverse_curvature(
    moments: Float64[Tensor, "dim_and_one dim_and_one"],
    columns: int,
    standardised: bool,
    classes: int,
    weight_decay: float,
    epsilon: float = 1e-5,
) -> Float[Tensor, "columns_and_one columns_and_one"]:
    """What turns the gradient of a head's weights, with the bias as the last, into a step of Newton's from equal scores.

    `moments` are means of the products; the head sees the last columns, `standardised` or as they are. The loss includes
    half of `weight_decay` times the square of weights and biases.
    """
    seen = moments[-columns - 1 :, -columns - 1 :]
    if standardised:
        mean = seen[-1, :-1]
        covariance = seen[:-1, :-1] - mean.outer(mean)
        scale = (covariance.diagonal().clamp(min=0) + epsilon).rsqrt()
        seen = torch.block_diag(covariance * scale.outer(scale), seen[-1:, -1:])
    variances, directions = torch.linalg.eigh(seen)
    evenly = 1 / classes * (1 - 1 / classes)
    curvatures = evenly * (variances.clamp(min=0) + DAMPING * variances.mean()) + weight_decay
    return ((directions / curvatures) @ directions.T).float()


@torch.no_grad()
def precondition(
    linear: nn.Linear, inverse: Float[Tensor, "columns_and_one columns_and_one"], weight_decay: float
) -> None:
    """Replace the gradient of a head by the step that the curvature allows, weight decay included."""
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    slopes = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], 1)
    slopes += weight_decay * torch.cat([linear.weight, linear.bias[:, None]], 1)
    step = slopes @ inverse
    linear.weight.grad.copy_(step[:, :-1])
    linear.bias.grad.copy_(step[:, -1])
