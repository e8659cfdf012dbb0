"""A cache of the test's own, and labelled images whose classes are colours."""

import numpy as np
import PIL.Image
import pytest

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40), "yellow": (210, 200, 60)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def colours(tmp_path):
    """Twelve images a class to learn from and four to be tested on, of several sizes."""
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
