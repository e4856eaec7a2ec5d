"""What is built of the source once, and installed by several tests."""

import pathlib
import sys
import tarfile

import pytest

from tests import programs

ROOT = pathlib.Path(__file__).parents[2]


def build(source: pathlib.Path, target: str, to: pathlib.Path) -> pathlib.Path:
    programs.output(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", to, cwd=source)
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@pytest.fixture(scope="session")
def wheel(unpacked: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel as pip makes it from the source archive."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))
