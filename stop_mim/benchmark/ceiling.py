"""How fast this machine multiplies matrices: what the speed of a step is held against."""

import statistics

import torch

from stop_mim.benchmark.timing import run_seconds

SIDE_ON_GPU, SIDE_ON_CPU = 8192, 1024
PRODUCTS, REPEATS = 10, 5


def matrix_ceiling(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Operations a second of one large square matrix product, the median of some runs, after as many to warm up."""
    side = side or (SIDE_ON_GPU if device.type == "cuda" else SIDE_ON_CPU)
    # Zeros would draw less power than numbers do, and a GPU at its limit of power would run faster with them.
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=result)

    run_seconds(multiply, device, PRODUCTS, 1)
    return 2 * side**3 / statistics.median(run_seconds(multiply, device, PRODUCTS, REPEATS))
