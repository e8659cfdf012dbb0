"""Registries: things that are chosen by name, each defined in one file with one decorator.

A registry imports the modules of its package at the first lookup, so that a new file there is found without being named
anywhere. Modules from outside are plugins: see `load_plugins`.
"""

import ast
import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from stop_mim.errors import InputError

PLUGINS_VARIABLE = "STOP_MIM_PLUGINS"
PLUGINS_GROUP = "stop_mim.plugins"

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries of one kind by name, in the order of registration.

    Args:
        kind: what an entry is called in errors, such as "recipe".
        package: dotted name of a package (or module) whose modules register the built-in entries.
        slow: dotted name of a module that takes long to import and registers the built-in entries. It is imported when one
            of them is used; their names and docstrings are read from its source.
    """

    def __init__(self, kind: str, package: str | None = None, slow: str | None = None) -> None:
        self.kind, self._package, self._slow = kind, package, slow
        self._entries: dict[str, Entry] = {}

    @cached_property
    def _listed(self) -> dict[str, str]:
        """The docstrings of the entries of the slow module, by name."""
        spec = None if self._slow is None else find_spec(self._slow)
        if spec is None or spec.origin is None:
            return {}
        return {
            str(decorator.args[0].value): ast.get_docstring(node) or ""
            for node in ast.parse(Path(spec.origin).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)
            if decorator.func.attr == "register" and isinstance(decorator.args[0], ast.Constant)
        }

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that adds a function, class or object under `name`."""

        def add(entry: Registered) -> Registered:
            is_listed = name in self._listed and getattr(entry, "__module__", None) != self._slow
            if is_listed or self._entries.get(name, entry) is not entry:
                raise ValueError(f"The {self.kind} '{name}' is registered twice: choose another name.")
            # The type of the entry is kept, so that a decorated function can still be called directly.
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def find(self, name: str) -> Entry:
        """Return the entry of that name; raise InputError, with the closest name, if there is none."""
        if name in self:
            return self[name]
        raise unknown_name(self.kind, name, self)

    def summary(self, name: str) -> str:
        """Return the first line of an entry's docstring, its help on the command line."""
        return (self._listed.get(name) or self[name].__doc__ or "").strip().splitlines()[0]

    def __getitem__(self, name: str) -> Entry:
        self._load()
        if self._slow is not None and name in self._listed:
            importlib.import_module(self._slow)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries or name in self._listed

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter({**self._listed, **self._entries})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _load(self) -> None:
        if self._package is None:
            return
        name, self._package = self._package, None
        module = importlib.import_module(name)
        for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
            importlib.import_module(f"{name}.{found.name}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not among the known ones, with the closest of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or [one for one in names if name and name in one][:3]
    remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else f"choose one of {', '.join(names)}."
    return InputError(f"There is no {kind} '{name}': {remedy}")


def load_plugins() -> None:
    """Import the modules that register entries from outside the package.

    These are the modules named in the environment variable STOP_MIM_PLUGINS, separated by commas, from the Python path or
    the current folder, and the entry points of the group `stop_mim.plugins` of installed packages.
    """
    names = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip()]
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            raise InputError(
                f"{PLUGINS_VARIABLE} names '{name}': give the name of a module, such as my_plugin for my_plugin.py."
            )
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that the plugin itself misses is an error of the plugin.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise InputError(
                f"{PLUGINS_VARIABLE} names the module '{name}', which cannot be found: check PYTHONPATH."
            ) from error
    for entry in entry_points(group=PLUGINS_GROUP):
        entry.load()
