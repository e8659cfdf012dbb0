"""Options of `stop-mim bench` and `stop-mim plan`, in addition to the fields of the run."""

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


@dataclass(frozen=True)
class PlanConfig(Checked):
    """The GPUs that a run is planned for."""

    gpus: Annotated[int, ABOVE_ZERO] = 8
    """GPUs in all."""
    memory: Annotated[float, ABOVE_ZERO] = 80.0
    """Memory of one GPU, in GiB."""
    gpus_per_machine: Annotated[int, ABOVE_ZERO] = 8
    """GPUs of one machine."""
    images_per_second: Annotated[float | None, ABOVE_ZERO] = None
    """Speed of one GPU, as `stop-mim bench` measures it; not given: no speed is planned."""
    within: Annotated[float, ABOVE_ZERO] = 300.0
    """Bandwidth of a GPU within its machine, in GB/s (NVLink of an H100: 300 to 400)."""
    between: Annotated[float, ABOVE_ZERO] = 40.0
    """Bandwidth of a GPU to other machines, in GB/s (400 Gb/s InfiniBand per GPU: about 40)."""
