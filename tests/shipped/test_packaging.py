"""What pip and docker get: the wheel, the source archive, the program as installed, the locks."""

import email
import json
import pathlib
import re
import shlex
import shutil
import sys
import tomllib
import zipfile

import packaging.requirements
import packaging.utils
import pytest

import mig_manager
from mig_manager.cli import registry
from mig_manager.cli.toolkit import parser
from tests.rigs import contract, programs
from tests.rigs.shipped.dockerfile import instructions
from tests.rigs.shipped.unit_files import MANUAL, PLUGIN_MANUAL
from tests.shipped import building, locks

ROOT = pathlib.Path(__file__).parents[2]
DATA = f"mig_manager-{mig_manager.__version__}.data/data/share"


@pytest.mark.slow
def test_wheel_has_modules_data_and_metadata_alone(wheel: pathlib.Path) -> None:
    about = f"mig_manager-{mig_manager.__version__}.dist-info"
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mig_manager").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        profiles = archive.read("mig_manager/profiles/mig-parted.yaml")
        metadata = email.message_from_string(archive.read(f"{about}/METADATA").decode())
        licence = archive.read(f"{about}/licenses/LICENSE")

    assert profiles == (ROOT / "profiles" / "mig-parted.yaml").read_bytes()
    assert {"mig_manager/py.typed", "mig_manager/catalogue/hardware.json"} <= names
    assert {name for name in names if name.endswith(".py")} == modules
    assert f"{DATA}/mig-manager/systemd/mig-manager-boot.service" in names
    rest = {name for name in names if not name.startswith(f"{DATA}/")}
    assert {name.partition("/")[0] for name in rest} == {"mig_manager", about}
    assert metadata["Version"] == mig_manager.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_wheel_has_the_schemas_and_pages_of_its_source_and_no_old_ones(
    sources: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source = shutil.copytree(sources, tmp_path / "source")
    # As the image is built: what an editable install has left lies there, and git is not asked.
    (source / ".gitignore").unlink()
    old = source / "mig_manager" / "schemas"
    old.mkdir()
    for name in ("Plan.json", "Gone.json"):
        (old / name).write_text("{}")

    built = building.build(source, "wheel", tmp_path / "wheel")

    with zipfile.ZipFile(built) as archive:
        names = [name for name in archive.namelist() if "/schemas/" in name or "/man/" in name]
        schemas = {
            name: archive.read(f"mig_manager/schemas/{name}")
            for name in contract.installed_schemas()
        }
    assert {
        name: text.decode() for name, text in schemas.items()
    } == contract.installed_schemas(), "run: pip install -e ."
    pages = {f"{DATA}/man/man1/{name}" for name in (*MANUAL, *PLUGIN_MANUAL)}
    assert sorted(names) == sorted(pages | {f"mig_manager/schemas/{name}" for name in schemas})


@pytest.mark.slow
def test_manual_pages_are_well_formed(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    options = ("-T", "lint", "-W", "warning")

    lint = programs.run(
        programs.path_or_skip("mandoc"), *options, *tmp_path.glob(f"{DATA}/man/man1/*")
    )

    # No date: the same version has the same page, whenever it is made.
    assert [line for line in lint.stdout.splitlines() if "missing date" not in line] == []


@pytest.mark.slow
def test_a_source_that_was_not_installed_says_how_to_make_its_schemas(
    sources: pathlib.Path,
) -> None:
    command = (sys.executable, "-B", "-m", "mig_manager", "schema", "Plan")

    done = programs.run(*command, cwd=sources)

    assert (done.returncode, done.stdout) == (2, "")
    assert "this source has no schemas" in done.stderr
    assert "pip install -e ." in done.stderr


def test_no_shipped_file_names_the_test_kit() -> None:
    shipped = [
        file
        for folder in ("charts", "deploy", "mig_manager", "profiles", "systemd")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    ]
    assert [str(file) for file in shipped if b"testkit" in file.read_bytes()] == []


@pytest.mark.slow
def test_the_source_archive_has_the_files_that_distributors_need(sources: pathlib.Path) -> None:
    required = (
        ".ci/run .dockerignore CHANGELOG.md CONTRIBUTING.md Dockerfile LICENSE README.md bench "
        "charts deploy docs justfile mkdocs.yml profiles pyproject.toml release systemd testkit "
        "tests"
    )

    assert [name for name in required.split() if not (sources / name).exists()] == []
    assert not list(sources.rglob("__pycache__"))


@pytest.mark.slow
def test_installed_program_partitions_a_simulated_gpu(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    # A folder that has the program alone; its libraries come from this environment.
    folder = tmp_path / "installed"

    def output(*command: str | pathlib.Path) -> str:
        return programs.output(*command, cwd=tmp_path, PYTHONPATH=str(folder))

    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    output(sys.executable, "-m", "pip", "install", *options, "--target", folder, wheel)

    # Commands need none of the demonstration's libraries.
    hidden = """
import sys
sys.modules.update(dict.fromkeys(("starlette", "uvicorn", "h11", "anyio")))
import mig_manager.__main__
print(mig_manager.__file__)
mig_manager.__main__.main()
"""
    applied = output(sys.executable, "-c", hidden, "apply", "all-1g.6gb", "--simulate", "1xA30")
    assert pathlib.Path(applied.splitlines()[0]).is_relative_to(folder)

    # The console script, started elsewhere than in the checkout.
    script = folder / "bin" / "mig-manager"
    assert output(script, "--version") == f"mig-manager {mig_manager.__version__}\n"
    status = output(script, "status", "--simulate", "1xA30", "-o", "json")
    assert "NVIDIA A30" in status
    assert status.count("1g.6gb") >= 4


# -- the image --------------------------------------------------------------------------------


def test_image_starts_the_agent_and_has_nvidias_names() -> None:
    (command,) = instructions("CMD")
    (made,) = (line for line in instructions("RUN") if "nvidia-mig-manager" in line)
    (labels,) = instructions("LABEL")
    image_labels = dict(word.split("=", 1) for word in shlex.split(labels))
    defaults = dict(line.split("=", 1) for line in instructions("ARG") if "=" in line)
    stages = instructions("FROM")

    assert instructions("ENTRYPOINT") == ['["mig-manager"]']
    assert parser.parse(registry.PROGRAM, json.loads(command))["command"] == "agent"
    assert made.endswith("&& ln -s mig-manager /opt/mig-manager/bin/nvidia-mig-parted")
    assert image_labels["org.opencontainers.image.version"] == mig_manager.__version__
    assert image_labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(stages) == 2
    assert all(stage.startswith("${PYTHON_IMAGE}") for stage in stages)
    assert re.fullmatch(r"python:3\.\d+-slim", defaults["PYTHON_IMAGE"])


# -- the locks --------------------------------------------------------------------------------


def requirements_of(name: str) -> list[packaging.requirements.Requirement]:
    """Return what pyproject.toml asks for that the lock file of that name must have."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = settings["dependency-groups"]
    direct = {
        "image": settings["project"]["dependencies"],
        "demo": [
            *settings["project"]["dependencies"],
            *settings["project"]["optional-dependencies"]["sandbox"],
        ],
        "build": [*groups["build"], *settings["build-system"]["requires"]],
        "tools": [*groups["build"], *groups["release"]],
        "go": groups["go"],
    }
    # A group that includes another says so with a table.
    texts = [line for line in direct[name] if isinstance(line, str)]
    return [packaging.requirements.Requirement(text) for text in texts]


@pytest.mark.parametrize("name", locks.NAMES)
def test_lock_file_has_versions_that_the_project_accepts(name: str) -> None:
    """Run release/lock when this fails: the dependencies have changed since."""
    locked = locks.read(name)

    assert requirements_of(name)
    for requirement in requirements_of(name):
        pin = locked[packaging.utils.canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), f"release/lock: {requirement}"
    for pin in locked.values():
        assert pin.hashes, f"{pin.name} can be installed unseen"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in pin.hashes)


def test_lock_files_that_meet_in_one_place_agree_on_versions() -> None:
    versions = {
        name: {(pin.name, pin.version) for pin in locks.read(name).values()}
        for name in locks.NAMES
    }

    assert versions["image"] < versions["demo"]
    assert versions["build"] < versions["tools"]


@pytest.mark.slow
def test_no_module_imports_omitted_parts_of_libraries() -> None:
    program = """
import importlib, pkgutil, sys, mig_manager
import mig_manager.adapters.kubernetes
for found in pkgutil.walk_packages(mig_manager.__path__, "mig_manager."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
mig_manager.adapters.kubernetes.kube_config()
print(*sys.modules)
"""
    text = (ROOT / "systemd" / "omit-unused").read_text(encoding="utf-8")
    (packages,) = re.findall(r"^for name in (.*); do$", text, re.MULTILINE)
    modules = ["kubernetes\\.aio", "kubernetes\\.client\\.(api|models)\\..*"]
    unused = "|".join([*modules, *packages.split()])
    omitted = re.compile(rf"({unused})(\..*)?")

    imported = programs.output(sys.executable, "-c", program).split()

    assert "kubernetes.client.rest" in imported
    assert omitted.fullmatch("aiohttp.client")
    assert not [name for name in imported if omitted.fullmatch(name)]
