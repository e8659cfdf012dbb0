"""Labelled colours, written once a module, and an untrained objective."""

import pytest
from tiny_run import tiny_objective, write_colours


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    return write_colours(tmp_path_factory.mktemp("probe") / "colours")


@pytest.fixture
def objective():
    return tiny_objective()
