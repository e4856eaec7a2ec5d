"""What hosted CI runs: pinned actions and existing files, with least rights; only tags publish."""

import pathlib
import re
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
ISSUER = "https://token.actions.githubusercontent.com"
"""Of the identities that GitHub's jobs sign with (docs.github.com, "OpenID Connect reference")."""

Object = dict[str, Any]


def workflow(name: str) -> Object:
    document: Object = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


def triggers(document: Any) -> Object:
    """Return what starts a workflow; YAML 1.1 reads the key ``on`` as true."""
    found: Object = document[True]
    return found


def steps(name: str) -> list[Object]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", ())]


def test_both_workflows_are_there() -> None:
    assert [path.name for path in FILES] == ["ci.yml", "release.yml"]


# -- what they run ----------------------------------------------------------------------------


def test_every_action_is_pinned_by_commit_with_its_version_and_the_same_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    for path in FILES:
        for used in re.findall(r"uses: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            if used.startswith("./"):
                assert (ROOT / used.split()[0]).is_file()
                continue
            action, at, pin = used.partition("@")
            assert at, used
            assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), used
            pins.setdefault(action, set()).add(pin)

    assert {action: len(each) for action, each in pins.items() if len(each) > 1} == {}
    assert pins.keys() >= {"actions/checkout", "actions/attest", "sigstore/cosign-installer"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_the_repository_that_a_step_names_exists(path: pathlib.Path) -> None:
    commands = "\n".join(step.get("run", "") for step in steps(path.name))
    named = set(re.findall(r"(?<![\w/$.])((?:\.ci|release|charts|tests)/[\w./-]+)", commands))

    assert named
    assert [each for each in sorted(named) if not (ROOT / each).exists()] == []


def test_ci_runs_all_of_ci_and_keeps_what_explains_a_failed_story() -> None:
    document = workflow("ci.yml")
    (cached,) = (step for step in steps("ci.yml") if "actions/cache@" in step.get("uses", ""))
    (kept,) = (step for step in steps("ci.yml") if "upload-artifact@" in step.get("uses", ""))

    assert triggers(document).keys() == {"push", "pull_request", "workflow_call"}
    assert " .ci/run\n" in "".join(step.get("run", "") for step in steps("ci.yml"))
    assert "hashFiles('tests/cluster/programs/**')" in cached["with"]["key"]
    build = (ROOT / "tests/cluster/programs/build").read_text(encoding="utf-8")
    assert "cache=${XDG_CACHE_HOME:-$HOME/.cache}/mig-manager-envtest\n" in build
    home = document["jobs"]["ci"]["env"]["XDG_CACHE_HOME"]
    assert cached["with"]["path"] == f"{home}/mig-manager-envtest/programs"
    assert (kept["if"], kept["with"]["path"]) == ("failure()", "realnode-bundles/")


# -- what they may ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_has_only_the_rights_that_it_names_an_end_and_no_secret(path: pathlib.Path) -> None:
    document = workflow(path.name)

    assert document["permissions"] == {}
    for name, job in document["jobs"].items():
        assert "permissions" in job, name
        assert "timeout-minutes" in job or "uses" in job, name
    assert "secrets" not in path.read_text(encoding="utf-8")
    for step in steps(path.name):
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


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


def test_a_rehearsal_builds_all_that_a_tag_publishes() -> None:
    jobs = workflow("release.yml")["jobs"]
    commands = {
        name: "".join(step.get("run", "") for step in job.get("steps", ()))
        for name, job in jobs.items()
        if "if" not in job
    }

    assert {"build", "packages", "chart", "assets"} <= set(
        re.findall(r"^release/(\S+)", commands["build"], re.MULTILINE)
    )
    assert "release/image build" in commands["image"]
    for text in commands.values():
        assert not re.search(r"\bpush\b|cosign|gh release|docker login", text)
