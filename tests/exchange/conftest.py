"""A small encoder with random weights, images for it, and files: the encoder's and one of a release's layout."""

import pytest
import torch
from release_files import release

from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.encoder_file import save_encoder


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


@pytest.fixture
def ours(encoder, tmp_path):
    save_encoder(encoder, tmp_path / "ours.safetensors")
    return tmp_path / "ours.safetensors"


@pytest.fixture
def released(tmp_path):
    torch.save(release(), tmp_path / "jepa.pth.tar")
    return tmp_path / "jepa.pth.tar"


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="needs the extra hf")
