"""A cache for each test, labelled images and features, and an encoder."""

import numpy as np
import PIL.Image
import pytest
import torch
from small_trainings import coloured, small_encoder

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


@pytest.fixture(scope="module")
def encoder():
    return small_encoder()


@pytest.fixture(scope="module")
def sets():
    return coloured(400), coloured(200, seed=1)


@pytest.fixture
def clusters():
    """Features and labels of five classes: 600 to train on, 300 to test."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 20, generator=generator)
    labels = torch.randint(5, (900,), generator=generator)
    features = 3 + 2 * (centres[labels] + 1.3 * torch.randn(900, 20, generator=generator))
    return features[:600], labels[:600], features[600:], labels[600:]
