"""One recording of each change for a whole session."""

import functools

import pytest

from tests.crash import kill_case


@pytest.fixture(scope="session")
def recorder() -> kill_case.Recorder:
    return functools.cache(kill_case.record)
