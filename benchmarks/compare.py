"""Other implementations of I-JEPA on the sizes of ours, in one process: what `stop-mim bench --bench.compare` measures.

python benchmarks/compare.py RECIPE [--GROUP.FIELD VALUE …]
"""

import sys

from lightly_ijepa import lightly_contender
from plain_ijepa import plain_contender
from stable_pretraining_ijepa import stable_pretraining_contender

CONTENDERS = {
    "plain PyTorch": plain_contender,
    "lightly": lightly_contender,
    "stable-pretraining": stable_pretraining_contender,
}

if __name__ == "__main__":
    from stop_mim.cli import main

    main(["bench", *sys.argv[1:], "--bench.compare"])
