"""Programs of the machine that some tests need."""

import shutil

import pytest


def needed(name: str) -> str:
    """Return the file of a program; a machine without it skips the test, which fails in CI."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
