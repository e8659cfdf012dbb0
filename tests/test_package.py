"""The public names, and the import order that docs/architecture.md claims."""

import ast
import graphlib
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
    """The line of a module: that of the longest path of the list that it begins with; the package itself is last."""
    if module == "__init__.py":
        return len(ORDER)
    found = [path for path in ORDER if module == path or (path.endswith("/") and module.startswith(path))]
    assert found, f"docs/architecture.md does not list {module}"
    return ORDER[max(found, key=len)]


def imported(module: str, at_once: bool = False) -> Iterator[str]:
    """The modules that a module imports, or imports at once, as paths; imports for type checkers alone do not count."""
    tree = ast.parse((PACKAGE / module).read_text())
    unchecked = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in tree.body if at_once else ast.walk(tree):
        if node in unchecked:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, whose order is not checked"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        ours = (name for name in names if f"{name}.".startswith("stop_mim.") and name != "stop_mim.__version__")
        yield from map(path_of, ours)


def path_of(name: str) -> str:
    """The module that a dotted name is in: "stop_mim.data.order" and "stop_mim.data.order.Order" are data/order.py."""
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        for ending in (".py", "/__init__.py"):
            if (path := "/".join(parts[:length]) + ending) in MODULES:
                return path
    return "__init__.py"


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


def test_no_imports_go_in_a_circle():
    graph = {module: {*imported(module, at_once=True)} for module in MODULES if module != "__init__.py"}
    list(graphlib.TopologicalSorter(graph).static_order())
