"""README and contributor guide: commands that work, and tasks that there are."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests import contract, programs
from tests.docs import pages

JUSTFILE = (pages.ROOT / "justfile").read_text(encoding="utf-8")
CI = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")
GUIDE = (pages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
README = (pages.ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 600
NOT_CLONED = shutil.ignore_patterns(
    *(".git", ".venv", "site", "dist", "build", "*.egg-info"),
    *("__pycache__", ".*_cache", ".hypothesis", "schemas"),
)
RECIPES = set(re.findall(r"^([a-z][a-z-]*)(?: \*\w+)?:", JUSTFILE, re.MULTILINE))
FORMS = sorted((pages.ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
JUST = shutil.which(
    "just", path=os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
)


def test_ci_runs_the_checks_of_the_task_runner() -> None:
    run = set(re.findall(r"^(?:plainly )?just ([a-z-]+)", CI, re.MULTILINE))

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


def command(program: str) -> str:
    """Return the command of the README that ends with a program."""
    (found,) = re.findall(rf"^```\n(python3 -m venv [^\n]*{program})\n```$", README, re.MULTILINE)
    return str(found)


def test_the_readme_shows_one_command_for_the_demonstration_and_one_for_the_tests() -> None:
    assert command("mig-manager demo").endswith("-e '.[sandbox]' && .venv/bin/mig-manager demo")
    assert command("pytest").endswith("-e '.[dev]' && .venv/bin/python -m pytest")


@pytest.mark.release
def test_the_readmes_first_command_leads_from_nothing_to_a_changed_node(
    tmp_path: pathlib.Path,
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(pages.ROOT, clone, ignore=NOT_CLONED)
    environ = {
        key: os.environ[key] for key in os.environ if key.startswith(("PATH", "SSL_", "PIP_"))
    }

    done = subprocess.run(  # noqa: S603 - our own README
        ["/bin/sh", "-c", command("mig-manager demo")],
        cwd=clone,
        env={**environ, "HOME": str(tmp_path), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "success (Applied): Layout all-1g.5gb is active." in done.stdout
    assert done.stdout.count("✓") >= 4
    assert "✗" not in done.stdout
    assert (
        programs.output(clone / ".venv/bin/mig-manager", "schema", "Plan")
        == contract.made()["Plan.json"]
    )
