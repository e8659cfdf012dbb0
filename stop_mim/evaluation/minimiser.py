"""L-BFGS for many small problems at once: all take a step together, with one device synchronisation per step.

torch's own solves one problem, and synchronises dozens of times per step.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Points = Float[Tensor, "problems dim"]
Objective = Callable[[Points], tuple[Float[Tensor, " problems"], Points]]
"""Returns value and gradient of each problem at its point."""

SUFFICIENT_DECREASE, SHORTENING, MOST_SHORTENINGS = 1e-4, 0.3, 8
# The relative error of a value in single precision.
ROUNDING = 2e-7
STALLED_STEPS = 3


def minimise(
    objective: Objective,
    start: Points,
    steps: int = 200,
    history: int = 10,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Points, Float[Tensor, " problems"]]:
    """Return the lowest point found of each problem and its value; stops early when none of them improves.

    A problem whose step was too long tries a shorter one while the others go on.
    """
    point, (value, gradient) = start, objective(start)
    memory = _Memory(history, start)
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
        if progress is not None:
            progress(step + 1, steps)
        if bool(((failed >= MOST_SHORTENINGS) | (gained_nothing >= STALLED_STEPS)).all()):
            break
    return point, value


class _Memory:
    """The last accepted moves and changes of gradient of every problem, the newest last."""

    def __init__(self, most: int, like: Points) -> None:
        self.moves = like.new_zeros(most, *like.shape)
        self.changes = like.new_zeros(most, *like.shape)
        # One over the curvature along a move; zero where there is no move.
        self.inverses = like.new_zeros(most, len(like))
        self.scale = like.new_ones(len(like))

    def add(self, move: Points, change: Points, accepted: Bool[Tensor, " problems"]) -> None:
        product, square = (move * change).sum(1), change.square().sum(1)
        tells = accepted & (product > 1e-10 * square) & (square > 0)
        self.scale = torch.where(tells, product / torch.where(tells, square, 1.0), self.scale)
        inverse = 1 / torch.where(tells, product, 1.0)
        for kept, newest in ((self.moves, move), (self.changes, change), (self.inverses, inverse)):
            chosen = tells.view(-1, *[1] * (newest.dim() - 1))
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
