"""L-BFGS for many small problems at once: all take a step together, with one look at the device a step.

torch's own minimises one problem, and waits for the device dozens of times a step.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Points = Float[Tensor, "problems dim"]
Objective = Callable[[Points], tuple[Float[Tensor, " problems"], Points]]
"""From a point of each problem to its value there and the gradient."""

SUFFICIENT_DECREASE, SHORTENING, MOST_SHORTENINGS = 1e-4, 0.3, 8
# A value in single precision is no better known than this.
ROUNDING = 2e-7
STALLED_STEPS = 3


def minimise(
    objective: Objective,
    start: Points,
    steps: int = 200,
    history: int = 10,
    tick: Callable[[int, int], None] | None = None,
) -> Points:
    """The lowest point found of each problem; ends early when none of them gets any lower."""
    point, (value, gradient) = start, objective(start)
    memory = _Memory(history)
    stalled = 0
    for step in range(steps):
        direction = memory.direction(gradient)
        slope = (gradient * direction).sum(1)
        uphill = slope >= 0
        direction = torch.where(uphill[:, None], -gradient, direction)
        slope = torch.where(uphill, -gradient.square().sum(1), slope)
        length = torch.ones_like(value) if memory else 1 / gradient.abs().sum(1).clamp(min=1.0)
        for _ in range(MOST_SHORTENINGS):
            moved = point + length[:, None] * direction
            new_value, new_gradient = objective(moved)
            allowed = value + SUFFICIENT_DECREASE * length * slope + ROUNDING * value.abs()
            lower = new_value <= allowed
            if bool(lower.all()):
                break
            length = torch.where(lower, length, SHORTENING * length)
        gain = torch.where(lower, value - new_value, 0.0)
        memory.add(moved - point, new_gradient - gradient, lower)
        point = torch.where(lower[:, None], moved, point)
        gradient = torch.where(lower[:, None], new_gradient, gradient)
        stalled = stalled + 1 if bool((gain <= ROUNDING * value.abs()).all()) else 0
        value = torch.where(lower, new_value, value)
        if tick is not None:
            tick(step + 1, steps)
        if stalled == STALLED_STEPS:
            break
    return point


class _Memory:
    """The last moves and changes of gradient of every problem; one that tells nothing of the curvature counts as none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.moves: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scale: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.moves)

    def add(self, move: Points, change: Points, accepted: Bool[Tensor, " problems"]) -> None:
        product, square = (move * change).sum(1), change.square().sum(1)
        tells = accepted & (product > 1e-10 * square) & (square > 0)
        inverse = torch.where(tells, 1 / torch.where(tells, product, 1.0), 0.0)
        scale = torch.where(tells, product / torch.where(tells, square, 1.0), 1.0 if self.scale is None else self.scale)
        self.scale = scale
        self.moves = [*self.moves, (move, change, inverse)][-self.most :]

    def direction(self, gradient: Points) -> Points:
        """Less the gradient, times the inverse of the curvature as far as the moves tell it."""
        result, parts = gradient, []
        for move, change, inverse in reversed(self.moves):
            part = inverse * (move * result).sum(1)
            result = result - part[:, None] * change
            parts.append(part)
        if self.scale is not None:
            result = self.scale[:, None] * result
        for (move, change, inverse), part in zip(self.moves, reversed(parts), strict=True):
            other = inverse * (change * result).sum(1)
            result = result + (part - other)[:, None] * move
        return -result
