"""Encoders from and for other libraries. This module knows the export formats without importing torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stop_mim.registry import Registry

if TYPE_CHECKING:
    from stop_mim.exchange.formats import Exported, Place
    from stop_mim.models.encoder import Encoder

EXPORTERS: Registry[Callable[["Encoder", Path, "Place"], "Exported"]] = Registry(
    "export format", slow="stop_mim.exchange.formats"
)
"""Functions that write an encoder's files into a folder; the first line of the docstring is the help text."""
