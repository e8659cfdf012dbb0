"""Analysis of runs: numbers, figures and the report. This module lists the figures without importing torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stop_mim.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Registry[Callable[[Sequence[Path], str | None], "Figure"]] = Registry(
    "figure",
    places={
        "1": "stop_mim.analysis.figures:idea_figure",
        "3": "stop_mim.analysis.figures:learned_covariance_figure",
        "4": "stop_mim.analysis.figures:sigma_figure",
        "5": "stop_mim.analysis.figures:similarity_figure",
        "6": "stop_mim.analysis.figures:predictions_figure",
        "covariance": "stop_mim.analysis.figures:covariance_figure",
        "theory": "stop_mim.analysis.figures:theory_figure",
        "loss": "stop_mim.analysis.figures:loss_figure",
        "positions": "stop_mim.analysis.figures:positions_figure",
    },
)
