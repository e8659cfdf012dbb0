"""Stochastic positional embeddings (StoP) for masked image modelling.

Names are imported when they are first used, so that `stop_mim.positions` needs torch alone and the command line is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stop_mim.exchange.loading import load_encoder
    from stop_mim.library import evaluate, train
    from stop_mim.masking import BlockwiseMasks, Masks, MultiBlockMasks, RandomMasks, ReleasedMasks
    from stop_mim.models.data2vec import Data2Vec
    from stop_mim.models.encoder import Encoder, create_encoder
    from stop_mim.models.encoder_file import save_encoder
    from stop_mim.models.ijepa import IJEPA
    from stop_mim.models.mae import MAE
    from stop_mim.models.predictor import Predictor, context_projection
    from stop_mim.positions import (
        LearnedPositions,
        Positions,
        SinCosPositions,
        StochasticPositions,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "IJEPA",
    "MAE",
    "BlockwiseMasks",
    "Data2Vec",
    "Encoder",
    "LearnedPositions",
    "Masks",
    "MultiBlockMasks",
    "Positions",
    "Predictor",
    "RandomMasks",
    "ReleasedMasks",
    "SinCosPositions",
    "StochasticPositions",
    "context_projection",
    "create_encoder",
    "evaluate",
    "load_encoder",
    "save_encoder",
    "train",
]

_HOMES = {
    "stop_mim.positions": (
        "LearnedPositions",
        "Positions",
        "SinCosPositions",
        "StochasticPositions",
    ),
    "stop_mim.masking": ("BlockwiseMasks", "Masks", "MultiBlockMasks", "RandomMasks", "ReleasedMasks"),
    "stop_mim.models.mae": ("MAE",),
    "stop_mim.models.data2vec": ("Data2Vec",),
    "stop_mim.models.encoder": ("Encoder", "create_encoder"),
    "stop_mim.models.encoder_file": ("save_encoder",),
    "stop_mim.models.predictor": ("Predictor", "context_projection"),
    "stop_mim.models.ijepa": ("IJEPA",),
    "stop_mim.exchange.loading": ("load_encoder",),
    "stop_mim.library": ("evaluate", "train"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'stop_mim' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
