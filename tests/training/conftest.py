"""Scenes are drawn once a session, into a cache that the tests own."""

import pytest


@pytest.fixture(scope="session")
def scene_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("scene_cache")


@pytest.fixture(autouse=True)
def _own_cache(scene_cache, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(scene_cache))
