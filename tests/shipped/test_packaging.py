"""What pip and docker get: the wheel, the source archive, the program as installed, the locks."""

import email
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from typing import Any

import packaging.requirements
import packaging.utils
import pytest

import mig_manager
from mig_manager.cli import parser
from tests.shipped import locks

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 120

Program = Callable[..., str]


def run(*command: str, cwd: pathlib.Path, **environ: str) -> str:
    done = subprocess.run(  # noqa: S603 - the arguments are this file's own
        command,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd)} | environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: pathlib.Path, target: str, to: pathlib.Path) -> pathlib.Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(to), cwd=source)
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@pytest.fixture(scope="module")
def wheel(unpacked: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel as pip makes it from the source archive."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that has the program alone; its libraries come from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", *options, "--target", str(folder))
    run(*command, str(wheel), cwd=folder)
    return folder


@pytest.fixture
def program(installed: pathlib.Path, tmp_path: pathlib.Path) -> Program:
    """The console script, started elsewhere than in the checkout."""
    script = str(installed / "bin" / "mig-manager")
    return lambda *arguments: run(script, *arguments, cwd=tmp_path, PYTHONPATH=str(installed))


def test_the_wheel_has_every_module_and_the_data_and_nothing_beside_the_package(
    wheel: pathlib.Path,
) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mig_manager").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        profiles = archive.read("mig_manager/profiles/mig-parted.yaml")

    assert profiles == (ROOT / "profiles" / "mig-parted.yaml").read_bytes()
    assert {"mig_manager/py.typed", "mig_manager/catalogue/hardware.json"} <= names
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in names} == {
        "mig_manager",
        f"mig_manager-{mig_manager.__version__}.dist-info",
    }


def test_the_wheel_has_version_licence_and_readme(wheel: pathlib.Path) -> None:
    folder = f"mig_manager-{mig_manager.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{folder}/METADATA").decode()
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()

    metadata_ = email.message_from_string(metadata)
    assert metadata_["Version"] == mig_manager.__version__
    assert metadata_["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert metadata_.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_source_archive_has_what_a_distributor_needs(unpacked: pathlib.Path) -> None:
    wanted = (
        ".ci/run .dockerignore CHANGELOG.md CONTRIBUTING.md Dockerfile LICENSE README.md bench "
        "charts deploy docs justfile mkdocs.yml profiles pyproject.toml release systemd testkit "
        "tests"
    )

    assert [name for name in wanted.split() if not (unpacked / name).exists()] == []
    assert not list(unpacked.rglob("__pycache__"))


@pytest.mark.slow
def test_the_installed_program_is_the_wheels_and_partitions_a_simulated_gpu(
    program: Program, installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    where = "import mig_manager; print(mig_manager.__file__)"
    found = run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(installed))
    assert pathlib.Path(found.strip()).is_relative_to(installed)
    assert program("--version") == f"mig-manager {mig_manager.__version__}\n"
    assert all(command in program("--help") for command in parser.COMMANDS)

    program("apply", "all-1g.6gb", "--simulate", "1xA30")
    status = json.loads(program("status", "--simulate", "1xA30", "-o", "json"))

    assert "NVIDIA A30" in json.dumps(status)
    assert json.dumps(status).count("1g.6gb") >= 4


def test_the_installed_program_validates_its_own_profiles_without_a_gpu(program: Program) -> None:
    output = program("validate", "all-1g.6gb", "all-balanced", "--gpu", "A30", "-o", "json")

    assert json.loads(output)["is_valid"] is True


def test_commands_need_none_of_the_demonstrations_libraries(
    installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    hidden = """
import sys
sys.modules.update(dict.fromkeys(("starlette", "uvicorn", "h11", "anyio")))
from mig_manager import __main__
__main__.main()
"""
    output = run(
        *(sys.executable, "-c", hidden, "status", "--simulate", "1xA30"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )

    assert "NVIDIA A30" in output


# -- the image --------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    """Return what follows an instruction in the Dockerfile, each time it stands there."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return re.findall(rf"^{name} (.*)$", text.replace("\\\n", " "), re.MULTILINE)


def test_all_that_the_image_is_built_from_exists_and_reaches_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [
        source
        for line in instructions("COPY")
        if "--from" not in line
        for source in shlex.split(line)[:-1]
    ]

    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == set(sources)
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_starts_the_agent_when_nothing_else_is_asked_for() -> None:
    assert instructions("ENTRYPOINT") == ['["mig-manager"]']
    (command,) = instructions("CMD")
    assert parser.parse(json.loads(command))["command"] == "agent"


def test_the_image_has_the_names_of_nvidias_programs() -> None:
    (made,) = (line for line in instructions("RUN") if "nvidia-mig-manager" in line)

    assert made.endswith("&& ln -s mig-manager /opt/mig-manager/bin/nvidia-mig-parted")


def test_the_image_has_labels_with_its_version() -> None:
    (labels,) = instructions("LABEL")

    image_labels = dict(word.split("=", 1) for word in shlex.split(labels))

    assert image_labels["org.opencontainers.image.version"] == mig_manager.__version__
    assert image_labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_all_python_packages_of_the_image_come_by_hash_or_from_its_own_build() -> None:
    commands = [part.split() for line in instructions("RUN") for part in line.split("&&")]
    installs = [words for words in commands if "install" in words]

    assert len(installs) == 3
    for words in installs:
        assert {"--no-deps", "--no-cache-dir"} <= set(words)
        assert "--no-index" in words or {"--require-hashes", "--only-binary"} <= set(words)


def test_the_image_checks_its_health_with_a_module_of_the_program() -> None:
    (check,) = instructions("HEALTHCHECK")
    program, *options = json.loads(check.partition("CMD ")[2])

    assert program.startswith("/opt/mig-manager/bin/")
    assert options[:2] == ["-I", "-m"]
    assert importlib.util.find_spec(options[2])


def test_the_image_names_its_base() -> None:
    defaults = dict(line.split("=", 1) for line in instructions("ARG") if "=" in line)
    stages = instructions("FROM")

    assert all(stage.startswith("${PYTHON_IMAGE}") for stage in stages)
    assert len(stages) == 2
    assert re.fullmatch(r"python:3\.\d+-slim", defaults["PYTHON_IMAGE"])


# -- the locks --------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def wanted(name: str) -> list[packaging.requirements.Requirement]:
    """Return what pyproject.toml asks for that the lock file of that name must have."""
    settings = project()
    groups = settings["dependency-groups"]
    direct = {
        "image": settings["project"]["dependencies"],
        "demo": [
            *settings["project"]["dependencies"],
            *settings["project"]["optional-dependencies"]["sandbox"],
        ],
        "build": [*groups["build"], *settings["build-system"]["requires"]],
        "tools": [*groups["build"], *groups["release"]],
    }
    # A group that includes another says so with a table.
    texts = [line for line in direct[name] if isinstance(line, str)]
    return [packaging.requirements.Requirement(text) for text in texts]


@pytest.mark.parametrize("name", locks.NAMES)
def test_a_lock_file_has_what_the_project_asks_for_in_a_version_that_it_takes(name: str) -> None:
    """Run release/lock when this fails: the dependencies have changed since."""
    locked = locks.read(name)

    for requirement in wanted(name):
        pin = locked[packaging.utils.canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), f"release/lock: {requirement}"
    assert wanted(name)


@pytest.mark.parametrize("name", locks.NAMES)
def test_a_lock_file_names_nothing_but_versions_and_their_hashes(name: str) -> None:
    for pin in locks.read(name).values():
        assert pin.hashes, f"{pin.name} can be installed unseen"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in pin.hashes)


def test_lock_files_that_meet_in_one_place_agree_on_versions() -> None:
    def versions(name: str) -> set[tuple[str, str]]:
        return {(pin.name, pin.version) for pin in locks.read(name).values()}

    assert versions("image") < versions("demo")
    assert versions("build") < versions("tools")
