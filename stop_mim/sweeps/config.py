"""What a sweep is asked for, as frozen data: every field has a docstring, which the command line shows as its help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stop_mim.training.config import SpeedConfig

ScaleName = Literal["demo", "tiny-imagenet", "imagenet"]


@dataclass(frozen=True)
class SweepConfig:
    """Run a named grid of variants over seeds and compare them; the same command goes on where an earlier one stopped."""

    scale: ScaleName = "demo"
    """demo: drawn scenes, minutes on two cores; tiny-imagenet: ViT-S/8, 20 epochs; imagenet: ViT-B/16, 300 epochs."""
    data: str = ""
    """Images to train on; the demo scale has its own."""
    probe_data: str | None = None
    """Labelled images for the probes; not given: the data that are trained on. The demo scale has its own."""
    test_data: str | None = None
    """Test images of the probes; not given: the test split of the labelled images, or else a fifth of them."""
    low_shot_list: Path | None = None
    """Text file with the names of the few labelled images (imagenet: the published 1%); not given: drawn at random."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """A run of each variant for every seed; fewer than three allow no comparison."""
    variants: tuple[str, ...] = ()
    """Run only these variants of the grid; not given: all."""
    baseline: str | None = None
    """The variant that the others are compared with; not given: the sweep's own."""
    epochs: int | None = None
    """Epochs of every run instead of the scale's; the warm-up keeps its share."""
    out: Path | None = None
    """Folder of all runs and of the summary; not given: runs/sweep-NAME-SCALE."""
    side_by_side: int | None = None
    """Runs at the same time on each device; not given: one on the CPU, on a GPU as many small ones as fit, at most four."""
    dry_run: bool = False
    """Show the grid and the estimated time, and do nothing."""
    retry_failed: bool = False
    """Try runs again that failed before."""
    speed: SpeedConfig = field(default_factory=SpeedConfig)
