"""Random images, boxes and generators that repeat."""

import torch

SCALE, RATIO = (0.3, 1.0), (3 / 4, 4 / 3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=seeded(seed))


def random_floats(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=seeded(seed))


def repeated(size: tuple[int, int], count: int) -> torch.Tensor:
    return torch.tensor([size]).expand(count, 2)


def any_boxes(height: int, width: int, count: int) -> torch.Tensor:
    """Boxes of every shape, with the whole image and single pixels in opposite corners among them."""
    edges = [torch.randint(0, n + 1, (count, 2), generator=seeded(n)).sort(dim=1).values for n in (height, width)]
    starts = torch.stack([e[:, 0] for e in edges], 1).minimum(torch.tensor([height - 1, width - 1]))
    extents = torch.stack([e[:, 1] for e in edges], 1).sub(starts).clamp(min=1)
    special = torch.tensor([[0, 0, height, width], [0, 0, 1, 1], [height - 1, width - 1, 1, 1]])
    return torch.cat([special, torch.cat([starts, extents], dim=1)])
