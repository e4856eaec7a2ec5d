"""What hosted CI runs: existing files, and only tags publish; zizmor judges their pins."""

import os
import pathlib
import re
from typing import Any

import pytest
import yaml

from tests.rigs.api_objects import Object

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def workflow(name: str) -> Object:
    document: Object = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


def triggers(document: Any) -> Object:
    """Return what starts a workflow; YAML 1.1 reads the key ``on`` as true."""
    events: Object = document[True]
    return events


def steps(name: str) -> list[Object]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_the_repository_that_a_step_names_exists(path: pathlib.Path) -> None:
    commands = "\n".join(step.get("run", "") for step in steps(path.name))
    named = set(re.findall(r"(?<![\w/$.])((?:\.ci|release|charts|tests)/[\w./-]+)", commands))

    assert named
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_job_has_only_the_rights_that_it_names_and_no_secret(path: pathlib.Path) -> None:
    document = workflow(path.name)
    checkouts = [each for each in steps(path.name) if "checkout@" in each.get("uses", "")]

    assert document["permissions"] == {}
    assert all("permissions" in job for job in document["jobs"].values())
    assert "secrets" not in path.read_text(encoding="utf-8")
    assert all(each["with"]["persist-credentials"] is False for each in checkouts)


def test_only_jobs_that_a_pushed_tag_starts_may_write_and_they_wait_for_ci() -> None:
    document = workflow("release.yml")
    jobs: Object = document["jobs"]
    writers = {name for name, job in jobs.items() if "write" in job["permissions"].values()}

    def waits_for(name: str) -> set[str]:
        needed = jobs[name].get("needs", [])
        direct = {needed} if isinstance(needed, str) else set(needed)
        return direct.union(*(waits_for(each) for each in direct))

    assert triggers(document).keys() == {"push", "workflow_dispatch"}
    assert triggers(document)["push"] == {"tags": ["v*"]}
    assert writers == {"registry", "page", "pypi"}
    for name in writers:
        assert jobs[name]["if"] == "github.event_name == 'push'"
        assert waits_for(name) >= {"version", "ci", "build", "image"}
    assert waits_for("pypi") == jobs.keys() - {"pypi"}


def test_the_release_packs_with_the_version_of_nfpm_that_ci_tests_with() -> None:
    installs = [
        re.findall(r"nfpm/v2/cmd/nfpm@\S+", path.read_text(encoding="utf-8"))
        for path in (ROOT / ".ci" / "run", FOLDER / "release.yml")
    ]

    assert installs[0] == installs[1] != []


def test_the_release_runs_every_script_of_its_folder_but_that_of_the_locks() -> None:
    commands = "".join(step.get("run", "") for step in steps("release.yml"))
    scripts = (path for path in (ROOT / "release").iterdir() if path.is_file())

    assert [
        path.name
        for path in scripts
        if os.access(path, os.X_OK) and f"release/{path.name}" not in commands
    ] == ["lock"]
