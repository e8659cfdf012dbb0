"""What the options that trade exactness for speed do to the features: a sweep of its own, paired over seeds, for a GPU.

python benchmarks/shortcuts.py --data tiny-imagenet/train.parquet --test-data tiny-imagenet/val.parquet --epochs 5
"""

from dataclasses import replace

import tyro

from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.grid import STOP, sweep
from stop_mim.sweeps.runner import run_sweep

sweep(
    "shortcuts",
    "options that change the model or its rounding for speed",
    "default",
    {
        "default": STOP,
        "shared-context": {**STOP, "predictor.shared_context": True},
        "half-residual": {**STOP, "speed.half_residual": True},
        "fp8-target": {**STOP, "speed.fp8_target": True},
    },
)

if __name__ == "__main__":
    run_sweep("shortcuts", tyro.cli(SweepConfig, default=replace(SweepConfig(), scale="tiny-imagenet")))
