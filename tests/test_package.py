"""The public names, and the import order that docs/architecture.md claims."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stop_mim

PACKAGE = Path(stop_mim.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def claimed_order() -> dict[str, int]:
    """The line of the documented list on which each path stands; a folder stands for all that is in it."""
    listing = ARCHITECTURE.read_text().split("## Modules, in import order")[1].split("```")[1]
    lines = [line.split("  ")[0].split() for line in listing.strip().splitlines()]
    return {path: number for number, paths in enumerate(lines) for path in paths}


ORDER = claimed_order()


def place(module: str) -> int:
    """The line of a module: that of the longest path of the list that it begins with."""
    found = [path for path in ORDER if module == path or (path.endswith("/") and module.startswith(path))]
    assert found, f"docs/architecture.md does not list {module}"
    return ORDER[max(found, key=len)]


def imported(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, as paths; imports for type checkers alone do not count."""
    tree = ast.parse((PACKAGE / module).read_text())
    unchecked = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stop_mim.") and node not in unchecked:
            parts = (node.module or "").split(".")[1:]
            names = ["/".join([*parts, alias.name]) + ".py" for alias in node.names]
            whole = "/".join(parts) + ".py"
            own = whole if whole in MODULES else "/".join(parts) + "/__init__.py"
            yield from (name if name in MODULES else own for name in names)


def test_public_names():
    for name in stop_mim.__all__:
        assert getattr(stop_mim, name).__name__ == name
    assert set(stop_mim.__all__) <= set(dir(stop_mim))
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = stop_mim.Nonsense


def test_every_path_of_the_documented_list_exists():
    assert [path for path in ORDER if not (PACKAGE / path).exists()] == []


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("__init__.py", "__main__.py")])
def test_a_module_imports_only_from_those_above_it(module):
    below = {other for other in imported(module) if place(other) > place(module)}
    assert not below
