"""A projection, some patches, and positions with the noise of a seed."""

import pytest
import torch
from torch import nn

ENCODER_DIM, DIM = 12, 8


@pytest.fixture
def projection():
    torch.manual_seed(0)
    return nn.Linear(ENCODER_DIM, DIM)


@pytest.fixture
def indices():
    return torch.tensor([[0, 4, 7], [14, 1, 1]])


@pytest.fixture
def noisy():
    """Positions with the noise of a seed."""

    def draw(positions, indices, seed=0):
        noise = positions.draw_noise(indices, generator=torch.Generator().manual_seed(seed))
        return positions(indices, noise=noise)

    return draw
