"""What is built of the source once, and installed by several tests."""

import os
import pathlib
import shutil

import pytest

from tests.rigs import programs
from tests.shipped import building


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    sdist = building.build(building.ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    (root,) = programs.unpack(sdist, tmp_path_factory.mktemp("unpacked")).iterdir()
    return root


@pytest.fixture(scope="session")
def wheel(sources: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel as pip makes it from the source archive."""
    return building.build(sources, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def packages(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with what release/packages builds; with the variable DIST it is there, too."""
    folder = tmp_path_factory.mktemp("packages")
    building.packages(wheel, folder)
    if dist := os.environ.get("DIST"):
        pathlib.Path(dist).mkdir(exist_ok=True)
        for package in folder.glob("mig-manager[_-]*"):
            shutil.copy(package, dist)
    return folder
