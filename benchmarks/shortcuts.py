"""What the options that trade exactness for speed do to the features: a sweep of its own, with the options of all sweeps.

python benchmarks/shortcuts.py --scale tiny-imagenet --data tiny-imagenet/train.parquet --test-data tiny-imagenet/val.parquet
python benchmarks/shortcuts.py --variants default shared-context     # what needs no GPU, at demo scale
"""

import sys

from stop_mim.cli import main
from stop_mim.sweeps.grid import STOP, sweep

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
    main(["sweep", "shortcuts", *sys.argv[1:]])
