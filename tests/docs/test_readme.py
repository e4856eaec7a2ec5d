"""The README's first command works with nothing but the repository and Python."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tests.docs import pages

README = (pages.ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 600
NOT_CLONED = shutil.ignore_patterns(
    ".git",
    ".venv",
    "site",
    "dist",
    "build",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)


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
