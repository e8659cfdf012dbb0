"""One thread, here and in worker processes, so that both compute the same bits; a cache that the tests own."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sweep_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep_cache")


@pytest.fixture(autouse=True)
def _own_cache(sweep_cache, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(sweep_cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
