"""One recording of each scenario for a whole session."""

import functools

import pytest

from tests.crash import matrix


@pytest.fixture(scope="session")
def recorder() -> matrix.Recorder:
    return functools.cache(matrix.record)
