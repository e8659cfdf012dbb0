"""Options of `stop-mim bench`, beside the fields of the run that it measures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from stop_mim.constraints import ABOVE_ZERO, Checked

ImagesFrom = Literal["auto", "synthetic", "data"]


@dataclass(frozen=True)
class BenchConfig(Checked, group="bench"):
    """What is measured, and how often."""

    images: ImagesFrom = "auto"
    """synthetic: random images on the device; data: from the loader; auto: from the loader if --data is given."""
    repeats: Annotated[int, ABOVE_ZERO] = 5
    """Timed runs; their median and quartiles are reported."""
    steps: Annotated[int, ABOVE_ZERO] = 20
    """Steps of a timed run, and timed calls of each part."""
    warmup: Annotated[int, ABOVE_ZERO] = 10
    """Steps and calls before the timing starts."""
    json: Path | None = None
    """File for all measurements."""
