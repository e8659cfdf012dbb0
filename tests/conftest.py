"""Shapes in signatures are checked in every test: jaxtyping's hook must come before the package is imported."""

from jaxtyping import install_import_hook

SHAPED = ["masking", "models", "data", "training", "evaluation", "analysis"]

install_import_hook([f"stop_mim.{name}" for name in SHAPED], "beartype.beartype")
