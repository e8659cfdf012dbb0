"""A cache for each test, a run, labelled images of several kinds, and an encoder for them."""

import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from small_trainings import coloured, silent, small_encoder

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

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40), "yellow": (210, 200, 60)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    # Scores of encoders without a run directory are kept in the current one.
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def colours(tmp_path):
    """Twelve training and four test images per class, of several sizes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, colour in COLOURS.items():
            folder = tmp_path / "colours" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise = random.integers(-60, 60, (36, 33 + number % 4, 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(folder / f"{name}_{number:02d}.png")
    return tmp_path / "colours"


@pytest.fixture(scope="session")
def trained(tmp_path_factory, scene_cache):
    """A run of two steps that nobody writes into."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = TrainConfig(
        data="scenes:count=16,size=32",
        out=str(folder),
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
        predictor=PredictorConfig(width=16, depth=1, heads=2),
        optim=OptimConfig(epochs=1, batch_size=8, warmup_epochs=0.0, ema_start=0.9, ema_final=0.9),
        speed=SpeedConfig(device="cpu"),
        log=LogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=1),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_MIM_CACHE", str(scene_cache))
        train(config, console=silent())
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run of two steps."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def alike(tmp_path):
    """Images of one size, of two classes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for place, name in enumerate(("dark", "light")):
            folder = tmp_path / "alike" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, (40, 40, 3)) + 120 * place
                PIL.Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}_{number}.png")
    return tmp_path / "alike"


@pytest.fixture(scope="module")
def encoder():
    return small_encoder()


@pytest.fixture(scope="module")
def sets():
    return coloured(400), coloured(200, seed=1)
