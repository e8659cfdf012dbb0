"""One thread, and scenes that are drawn once a session, into a cache that the tests own."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Models this small gain nothing from threads, and on a busy machine threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def scene_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("scene_cache")


@pytest.fixture(autouse=True)
def _own_cache(scene_cache, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(scene_cache))
