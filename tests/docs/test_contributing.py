"""The contributor guide agrees with the task runner and with CI."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.docs import pages

JUSTFILE = (pages.ROOT / "justfile").read_text(encoding="utf-8")
CI = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")
GUIDE = (pages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = set(re.findall(r"^([a-z][a-z-]*)(?: \*\w+)?:", JUSTFILE, re.MULTILINE))
FORMS = sorted((pages.ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
JUST = shutil.which(
    "just", path=os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
)


def test_ci_runs_the_checks_of_the_task_runner() -> None:
    run = set(re.findall(r"^just ([a-z-]+)", CI, re.MULTILINE))

    assert {"lint", "types", "layers", "docs", "test"} <= run <= RECIPES


def test_the_guide_names_the_tasks_that_there_are() -> None:
    documented = set(re.findall(r"^\| `just ([a-z-]+)`", GUIDE, re.MULTILINE))

    assert documented <= RECIPES
    assert RECIPES - documented <= {"default", "docs-serve", "format"}


def test_hooks_before_a_commit_run_tasks_that_there_are_and_download_nothing() -> None:
    text = (pages.ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    hooks = [hook for repo in yaml.safe_load(text)["repos"] for hook in repo["hooks"]]

    assert {repo["repo"] for repo in yaml.safe_load(text)["repos"]} == {"local"}
    assert {hook["entry"].removeprefix("just ") for hook in hooks} <= RECIPES
    assert {hook["language"] for hook in hooks} == {"system"}


@pytest.mark.skipif(JUST is None, reason="just is not in this environment")
def test_the_task_runner_understands_its_file() -> None:
    listed = subprocess.run(  # noqa: S603 - our own file
        [str(JUST), "--summary"], cwd=pages.ROOT, capture_output=True, encoding="utf-8", check=True
    )

    assert set(listed.stdout.split()) == RECIPES - {"default"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_has_what_its_host_asks_for(form: pathlib.Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert set(content) <= {"blank_issues_enabled", "contact_links"}
        return
    fields = [each for each in content["body"] if each["type"] != "markdown"]

    assert content["name"]
    assert content["description"]
    assert any(each.get("validations", {}).get("required") for each in fields)
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)
