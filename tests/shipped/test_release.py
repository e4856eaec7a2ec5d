"""What is published, built from the locks: the same twice, described in full, and working.

Takes the package index. With the variable DIST what was built stays in that folder.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import sys
import tarfile
from typing import Any

import packaging.utils
import pytest

import mig_manager
from tests.rigs import programs
from tests.shipped import locks
from tests.shipped.building import EPOCH, run, uv

pytestmark = pytest.mark.release

ROOT = pathlib.Path(__file__).parents[2]
SUITE = tuple(
    str((ROOT / "tests" / name).resolve(strict=True).relative_to(ROOT.resolve()))
    for name in (
        "unit/layout/test_layout_parser.py",
        "change/test_applying.py",
        "shell/test_plan_text.py",
        "adapters/nvml/test_worker.py",
        "shell/test_agent_settings.py",
        "shipped/test_shipped_profiles.py",
    )
)
"""Quick tests of each kind: pure ones, of a change in memory, at the shell, of processes, of data.

A moved file fails when this one is collected, which each run of the tests does.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The output of one run of release/build."""

    dist: pathlib.Path
    work: pathlib.Path

    @property
    def wheel(self) -> pathlib.Path:
        return self.only("*.whl")

    @property
    def sdist(self) -> pathlib.Path:
        return self.only("*.tar.gz")

    @property
    def bill(self) -> dict[str, Any]:
        bill: dict[str, Any] = json.loads(self.only("*.cdx.json").read_text(encoding="utf-8"))
        return bill

    def only(self, pattern: str) -> pathlib.Path:
        (path,) = self.dist.glob(pattern)
        return path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    work = tmp_path_factory.mktemp("work")
    dist = pathlib.Path(os.environ.get("DIST") or tmp_path_factory.mktemp("dist")).absolute()
    uv()
    run(ROOT / "release" / "build", dist, work, cwd=work, SOURCE_DATE_EPOCH=EPOCH)
    return Release(dist=dist, work=work)


@pytest.fixture(scope="module")
def sources(release: Release, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What the source archive holds, with times and rights that differ from the checkout's."""
    (root,) = programs.unpack(release.sdist, tmp_path_factory.mktemp("unpacked")).iterdir()
    for path in root.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (0, 0))
    return root


@pytest.fixture(scope="module")
def python(release: Release, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of a user who installs the wheel and what the demonstration takes."""
    folder = tmp_path_factory.mktemp("user")
    made = folder / "bin" / "python"
    install = (uv(), "pip", "install", "--python", made, "--no-deps")
    run(uv(), "venv", "--python", sys.executable, folder, "--clear", cwd=folder)
    demo = ROOT / "release" / "demo.txt"
    run(*install, "--require-hashes", "--only-binary=:all:", "-r", demo, cwd=folder)
    run(*install, "--offline", release.wheel, cwd=folder)
    return made


# -- what is built ----------------------------------------------------------------------------


def test_another_build_in_another_place_gives_the_same_bytes(
    release: Release, sources: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """From the source archive itself, whose files have other times and rights."""
    build = (release.work / "tools" / "bin" / "python", "-m", "build", "--no-isolation")
    run(*build, "--outdir", tmp_path, cwd=sources, SOURCE_DATE_EPOCH=EPOCH, PYTHONHASHSEED="7")

    for built in (release.wheel, release.sdist):
        assert (tmp_path / built.name).read_bytes() == built.read_bytes()
    with tarfile.open(release.sdist) as archive:
        assert {member.mtime for member in archive} == {int(EPOCH)}


def test_the_plugin_is_packed_from_the_build_and_runs_alone(
    release: Release, tmp_path: pathlib.Path
) -> None:
    folder = release.dist / "krew"
    programs.unpack(next(folder.glob("*.tar.gz")), tmp_path)

    output = run(sys.executable, "-S", tmp_path / "kubectl-mig", "version", cwd=tmp_path)

    assert output == f"kubectl-mig {mig_manager.__version__}\n"
    assert f"version: v{mig_manager.__version__}" in (folder / "mig.yaml").read_text("utf-8")


# -- the bill of materials --------------------------------------------------------------------


def test_the_bill_lists_exactly_the_locked_packages_of_the_image(release: Release) -> None:
    text = (ROOT / "systemd" / "omit-unused").read_text(encoding="utf-8")
    (omitted,) = re.findall(r"^for name in (.*); do$", text, re.MULTILINE)
    unused = set(map(packaging.utils.canonicalize_name, omitted.split()))
    locked = {(pin.name, pin.version) for pin in locks.read("image").values() if pin.is_for_here}

    assert {
        (packaging.utils.canonicalize_name(each["name"]), each["version"])
        for each in release.bill["components"]
    } == {(name, version) for name, version in locked if name not in unused}


def test_bill_has_a_licence_and_an_address_for_each_package(release: Release) -> None:
    bill = release.bill
    subject = bill["metadata"]["component"]

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert (subject["name"], subject["version"]) == ("mig-manager", mig_manager.__version__)
    assert subject["licenses"][0]["license"]["id"] == "Apache-2.0"
    for each in bill["components"]:
        assert each["licenses"], each["name"]
        name = each["name"].lower().replace("_", "-")
        assert each["purl"] == f"pkg:pypi/{name}@{each['version']}"


def test_only_packages_that_the_program_takes_are_locked(release: Release) -> None:
    bill = release.bill
    needs = {each["ref"]: set(each.get("dependsOn", ())) for each in bill["dependencies"]}
    reached: set[str] = set()
    ahead = {bill["metadata"]["component"]["bom-ref"]}
    while ahead:
        reached |= ahead
        ahead = set().union(*(needs[ref] for ref in ahead)) - reached

    assert {each["bom-ref"] for each in bill["components"]} - reached == set()


# -- the locks --------------------------------------------------------------------------------


def test_the_locked_packages_are_complete(release: Release) -> None:
    output = run(uv(), "pip", "check", "--python", release.work / "image", cwd=release.work)

    assert "All installed packages are compatible" in output


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_image_can_be_made_for_both_machines_without_compiling(
    machine: str, tmp_path: pathlib.Path
) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\S+)-slim$", text, re.MULTILINE)
    target = ("--python-platform", f"{machine}-manylinux_2_28", "--python-version", version)
    strictly = ("--no-deps", "--only-binary=:all:", "--require-hashes")
    locked = ROOT / "release" / "image.txt"

    output = run(
        *(uv(), "pip", "install", "--dry-run", "--target", tmp_path / "none"),
        *(*target, *strictly, "-r", locked),
        cwd=tmp_path,
    )

    assert f"Would install {len(locks.read('image'))} packages" in output


def test_a_package_that_is_not_the_locked_one_is_not_installed(tmp_path: pathlib.Path) -> None:
    made = tmp_path / "environment"
    run(uv(), "venv", "--python", sys.executable, made, cwd=tmp_path)
    pin = next(iter(locks.read("image").values()))
    forged = tmp_path / "forged.txt"
    forged.write_text(f"{pin.name}=={pin.version} --hash=sha256:{'0' * 64}\n", encoding="utf-8")
    install = (uv(), "pip", "install", "--python", made, "--no-deps", "--require-hashes")

    output = run(*install, "-r", forged, cwd=tmp_path, fails=True)

    assert "Hash mismatch" in output


# -- what is installed ------------------------------------------------------------------------


def test_the_installed_program_does_what_the_readme_promises(
    python: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def program(*arguments: str) -> str:
        return run(python.with_name("mig-manager"), *arguments, cwd=tmp_path)

    assert program("version") == f"mig-manager {mig_manager.__version__}\n"
    assert program("validate", "all-1g.6gb", "--gpu", "NVIDIA A30")
    assert "0 instances destroyed, 4 created" in program(
        "apply", "all-1g.6gb", "--simulate", "1xA30"
    )
    assert "1g.6gb" in program("status", "--simulate", "1xA30")
    assert program("assert", "all-1g.6gb", "--simulate", "1xA30")
    output = program("demo", "--color", "never")
    assert "success (Applied)" in output


def test_quick_tests_pass_against_the_installed_program(
    python: pathlib.Path, sources: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """From the source archive, without the program's source, so that nothing else can be meant."""
    bench = tmp_path / "bench"
    shutil.copytree(sources, bench, ignore=shutil.ignore_patterns("mig_manager"))
    tools = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in (
            *("hypothesis", "jsonschema", "packaging"),
            *("pytest", "pytest-timeout", "pytest-xdist"),
        )
    ]
    run(uv(), "pip", "install", "--python", python, *tools, cwd=bench)

    where = run(python, "-c", "import mig_manager; print(mig_manager.__file__)", cwd=bench)
    pytest_here = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    collected = run(*pytest_here, "--collect-only", "-n0", "-m", "", cwd=bench)
    output = run(*pytest_here, *SUITE, cwd=bench)

    assert pathlib.Path(where.strip()).is_relative_to(python.parents[1])
    assert re.search(r"^\d{4,} tests collected", collected, re.MULTILINE), collected
    assert re.search(r"^\d+ passed(, \d+ xfailed)? in", output, re.MULTILINE), output
