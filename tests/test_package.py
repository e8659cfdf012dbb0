"""The public names, and the way of the data: a module imports only from those before it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stop_mim

PACKAGE = Path(stop_mim.__file__).parent
LAYERS = [
    "errors files seeds registry constraints results",
    "positions",
    "data",
    "masking",
    "models",
    "training",
    "exchange",
    "evaluation",
    "benchmark",
    "sweeps",
    "analysis",
    "demo",
    "cli",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}


def test_public_names():
    from stop_mim import (  # noqa: F401
        IJEPA,
        LearnedPositions,
        MultiBlockMasks,
        Predictor,
        RandomMasks,
        SinCosPositions,
        StochasticPositions,
        load_encoder,
    )

    for name in stop_mim.__all__:
        assert getattr(stop_mim, name).__name__ == name
    assert set(stop_mim.__all__) <= set(dir(stop_mim))
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = stop_mim.Nonsense


def test_positions_load_without_the_rest():
    code = "import sys, stop_mim.positions; print([m for m in ('timm', 'torchvision', 'tyro') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module and module.startswith("stop_mim."):
                assert RANK[module.split(".")[1]] <= RANK[own], f"{path.name} imports {module}"
