"""Registries find their entries by name; plugins that exist are tested in test_plugins.py."""

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


def test_built_in_entries_are_imported_when_they_are_used():
    things: Registry[object] = Registry(
        "thing", places={"far": "no_such_module:thing", "near": "stop_mim.registry:Registry"}
    )
    assert [*things] == ["far", "near"]
    assert things.find("near") is Registry
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        things.find("far")


def test_a_name_cannot_be_taken_twice():
    things: Registry[int] = Registry("thing")
    things.register("a")(1)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        things.register("a")(2)


def test_a_plugin_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("STOP_MIM_PLUGINS", "no_such_plugin")
    with pytest.raises(InputError, match="'no_such_plugin'"):
        load_plugins()
