"""What `stop-mim bench` is asked for, beside the fields of the run that it measures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stop_mim.training.config import require, require_choices

ImagesFrom = Literal["auto", "synthetic", "data"]


@dataclass(frozen=True)
class BenchConfig:
    """What is measured, and how often."""

    images: ImagesFrom = "auto"
    """synthetic: random images on the device; data: the loader's; auto: the loader's where --data is given, else synthetic."""
    repeats: int = 5
    """Timed runs: their median is told, with quartiles."""
    steps: int = 20
    """Steps of a timed run, and timed calls of each part."""
    warmup: int = 10
    """Steps and calls before the clock starts."""
    compare: bool = False
    """Measure other implementations of I-JEPA on the same sizes too; needs a clone of the repository."""
    scaling: bool = False
    """Measure other image sizes, batches, depths and numbers of context tokens too."""
    json: Path | None = None
    """File for all that was measured."""

    def __post_init__(self) -> None:
        require_choices(self, "bench")
        for name in ("repeats", "steps", "warmup"):
            require(self, "bench", name, getattr(self, name) > 0, "give a number above zero")
