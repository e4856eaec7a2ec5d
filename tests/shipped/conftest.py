"""What is built of the source once, and installed by several tests."""

import os
import pathlib
import shutil
import sys

import pytest

from tests import programs
from tests.shipped import building

ROOT = pathlib.Path(__file__).parents[2]


def build(source: pathlib.Path, target: str, to: pathlib.Path, **environ: str) -> pathlib.Path:
    command = (sys.executable, "-B", "-m", "hatchling", "build", "-t", target, "-d", to)
    programs.output(*command, cwd=source, **environ)
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    (root,) = programs.unpacked(sdist, tmp_path_factory.mktemp("unpacked")).iterdir()
    return root


@pytest.fixture(scope="session")
def wheel(unpacked: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel as pip makes it from the source archive."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def packages(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with what release/packages builds; with the variable DIST it is there, too."""
    folder = tmp_path_factory.mktemp("packages")
    build_packages(wheel, folder)
    if dist := os.environ.get("DIST"):
        pathlib.Path(dist).mkdir(exist_ok=True)
        for package in folder.glob("mig-manager[_-]*"):
            shutil.copy(package, dist)
    return folder


def build_packages(wheel: pathlib.Path, folder: pathlib.Path, **environ: str) -> None:
    building.uv()
    programs.needed("nfpm")
    shutil.copy(wheel, folder)
    settings = {"SOURCE_DATE_EPOCH": building.EPOCH} | environ
    building.run(ROOT / "release" / "packages", folder, cwd=folder, fails=False, **settings)
