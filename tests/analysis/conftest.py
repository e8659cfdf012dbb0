"""One run that is trained once a session."""

import pytest
from analysed_runs import train_tiny


@pytest.fixture(scope="session")
def stop_run(tmp_path_factory):
    """StoP with sigma 0.25, two epochs of four steps on a grid of 4x6 patches; nobody writes into it."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "stop")
