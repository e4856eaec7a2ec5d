"""What ``conftest.py`` does for every test."""

import pathlib
import sys

import pytest

from tests import programs


@pytest.mark.parametrize(
    ("environ", "outcome"), [({}, "1 skipped"), ({"CI": "true"}, "1 failed")], ids=["", "CI"]
)
def test_a_skipped_test_fails_in_ci_and_says_what_is_missing(
    tmp_path: pathlib.Path, environ: dict[str, str], outcome: str
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("import pytest\n\ndef test_one():\n    pytest.skip('no kubectl')\n")

    command = (sys.executable, "-m", "pytest", "-p", "tests.conftest", "-rsf", file)
    done = programs.run(*command, cwd=pathlib.Path(__file__).parents[1], **environ)

    assert outcome in done.stdout, done.stdout + done.stderr
    assert "no kubectl" in done.stdout
