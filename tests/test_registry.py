"""Registries find their entries by name; plugins that exist are tested in test_plugins.py."""

import importlib
import sys

import pytest

from stop_mim.errors import InputError
from stop_mim.registry import Registry, load_plugins


def test_an_unknown_name_is_answered_with_the_closest_one():
    things: Registry[int] = Registry("thing")
    things.register("linear")(1)
    things.register("knn")(2)
    assert things.find("knn") == 2
    assert [*things] == ["linear", "knn"]
    with pytest.raises(InputError, match=r"thing 'liner'.*did you mean 'linear'"):
        things.find("liner")


FAST = """
from stop_mim.registry import Registry

THINGS = Registry("thing", slow="slow_things")
"""
SLOW = """
from fast_things import THINGS

@THINGS.register("far")
def far():
    '''Far away.

    More.'''
"""


def test_the_entries_of_a_slow_module_are_known_before_it_is_imported(tmp_path, monkeypatch):
    for name, text in {"fast_things": FAST, "slow_things": SLOW}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    things = importlib.import_module("fast_things").THINGS
    things.register("near")(len)
    assert [*things] == ["far", "near"]
    assert len(things) == 2
    assert things.summary("far") == "Far away."
    with pytest.raises(ValueError, match="'far' is registered twice"):
        things.register("far")(len)
    with pytest.raises(InputError, match="did you mean 'far'"):
        things.find("farr")
    assert "slow_things" not in sys.modules
    assert things.find("far").__name__ == "far"


def test_a_name_cannot_be_taken_twice():
    things: Registry[int] = Registry("thing")
    things.register("a")(1)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        things.register("a")(2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_plugin", "'no_such_plugin', which cannot be found: check PYTHONPATH"),
        ("no_such_package.plugin", "'no_such_package.plugin', which cannot be found"),
        ("my_plugin.py", r"'my_plugin.py': give the name of a module"),
        ("./my_plugin", r"'./my_plugin': give the name of a module"),
    ],
)
def test_a_plugin_that_does_not_exist_is_named(name, message, monkeypatch):
    monkeypatch.setenv("STOP_MIM_PLUGINS", name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(InputError, match=message):
        load_plugins()


def test_plugins_are_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "plugin_here.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOP_MIM_PLUGINS", " plugin_here ,")
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A dependency that the plugin misses is not taken for the plugin.
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_plugins()
