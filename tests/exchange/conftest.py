"""A small encoder with random weights, and images for it."""

import pytest
import torch

from stop_mim.models.encoder import Dimensions, create_encoder


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(48, 2, 3), image_size=32, patch_size=8)
    for name, parameter in encoder.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.normal_(1 if name.endswith("weight") else 0, 0.2)
    encoder.mean, encoder.std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    return encoder.eval()


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
