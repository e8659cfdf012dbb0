"""Folders of the test's own for what is cached and downloaded."""

import pytest


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setenv("STOP_MIM_DATA", str(tmp_path / ".data"))
