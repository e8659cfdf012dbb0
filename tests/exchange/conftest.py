"""A small encoder with random weights, and a run of two steps."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    OptimConfig,
    PredictorConfig,
    SpeedConfig,
    TrainConfig,
)
from stop_mim.training.pretrain import train


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


CONFIG = TrainConfig(
    data="scenes:count=16,size=32",
    encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
    predictor=PredictorConfig(width=16, depth=1, heads=2),
    optim=OptimConfig(epochs=1, batch_size=8, warmup_epochs=0.0, ema_start=0.9, ema_final=0.9),
    speed=SpeedConfig(device="cpu"),
    log=LogConfig(tensorboard=False),
    checkpoint=CheckpointConfig(every_steps=1),
)


@pytest.fixture
def run_config():
    return CONFIG


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    train(replace(CONFIG, out=str(out)), recipe="my-recipe", console=Console(file=io.StringIO()))
    return out


@pytest.fixture
def run(tmp_path, trained):
    return Path(shutil.copytree(trained, tmp_path / "run"))
