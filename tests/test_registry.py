"""Registries find their entries by name, import their package when asked, and load plugins from outside."""

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


def test_a_name_cannot_be_taken_twice():
    things: Registry[int] = Registry("thing")
    things.register("a")(1)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        things.register("a")(2)


def test_every_module_of_the_package_is_imported_at_the_first_lookup(tmp_path, monkeypatch):
    package = tmp_path / "some_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from stop_mim.registry import Registry\nTHINGS = Registry('thing', 'some_things')\n"
    )
    (package / "one.py").write_text("from some_things import THINGS\nTHINGS.register('one')(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_things

    assert "some_things.one" not in sys.modules
    assert dict(some_things.THINGS) == {"one": 1}


def test_plugins_are_the_modules_that_the_environment_names(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("STOP_MIM_PLUGINS", "my_plugin")
    load_plugins()
    assert sys.modules["my_plugin"].LOADED
    monkeypatch.setenv("STOP_MIM_PLUGINS", "no_such_plugin")
    with pytest.raises(InputError, match="'no_such_plugin'"):
        load_plugins()
