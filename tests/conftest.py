"""Shapes in signatures are checked in every test: jaxtyping's hook must come before the package is imported."""

from jaxtyping import install_import_hook

SHAPED = ["masking", "models", "data", "training", "evaluation", "analysis"]

# As everywhere in Python's typing, an int is welcome where a float is.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

install_import_hook([f"stop_mim.{name}" for name in SHAPED], CHECKER)
