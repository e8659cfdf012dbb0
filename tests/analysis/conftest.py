"""One thread, scenes in a cache that the tests own, and one run that is trained once a session."""

import pytest
import torch
from analysed_runs import train_tiny


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def analysis_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("analysis_cache")


@pytest.fixture(autouse=True)
def _own_cache(analysis_cache, monkeypatch):
    monkeypatch.setenv("STOP_MIM_CACHE", str(analysis_cache))


@pytest.fixture(scope="session")
def stop_run(tmp_path_factory, analysis_cache):
    """StoP with sigma 0.25, two epochs of four steps on a grid of 4x6 patches; nobody writes into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_MIM_CACHE", str(analysis_cache))
        return train_tiny(tmp_path_factory.mktemp("runs") / "stop")
