"""Analysis of runs: numbers, figures and the report. This module knows the figures without importing torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stop_mim.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Registry[Callable[[Sequence[Path], str | None], "Figure"]] = Registry(
    "figure", slow="stop_mim.analysis.figures"
)
