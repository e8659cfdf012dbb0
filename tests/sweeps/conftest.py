"""One thread in worker processes, as here, so that both compute the same bits."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread_in_workers(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
