"""What ``conftest.py`` does for every test."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.rigs import programs
from tests.rigs.matrices import matrix_rows


def run_pytest(*words: str | pathlib.Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "pytest", "-p", "tests.conftest", *words)
    return programs.run(*command, cwd=pathlib.Path(__file__).parents[1], **environ)


@pytest.mark.parametrize(
    ("environ", "outcome"), [({}, "1 skipped"), ({"CI": "true"}, "1 failed")], ids=["", "CI"]
)
def test_a_skipped_test_fails_in_ci_and_says_what_is_missing(
    tmp_path: pathlib.Path, environ: dict[str, str], outcome: str
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("import pytest\n\ndef test_one():\n    pytest.skip('no kubectl')\n")

    done = run_pytest("-rsf", file, **environ)

    assert outcome in done.stdout, done.stdout + done.stderr
    assert "no kubectl" in done.stdout


def test_a_part_of_a_matrix_keeps_the_results_of_its_other_rows(tmp_path: pathlib.Path) -> None:
    file, folder = tmp_path / "test_rows.py", tmp_path / "results"

    def count(number: int, *words: str) -> list[object]:
        file.write_text(
            "import pytest\n\n"
            "@pytest.mark.parametrize('name', ['one', 'two'])\n"
            "def test_row(name, record_property):\n"
            f"    record_property('a matrix', {{'row': name, 'tried': {number}}})\n"
        )
        done = run_pytest(file, f"--results={folder}", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        rows: list[object] = json.loads((folder / "a-matrix.json").read_text())
        return rows

    assert count(5) == [{"row": "one", "tried": 5}, {"row": "two", "tried": 5}]
    (folder / "runs.json").unlink()
    assert count(6, "-k", "two") == [{"row": "one", "tried": 5}, {"row": "two", "tried": 6}]
    # The commit is that of all rows.
    assert json.loads((folder / "runs.json").read_text()) == {}
    assert count(7) == [{"row": "one", "tried": 7}, {"row": "two", "tried": 7}]
    assert json.loads((folder / "runs.json").read_text()).keys() == {"a matrix"}


def test_a_row_that_was_never_counted_says_how_to_count_it() -> None:
    new = {"failure": "new", "node": "x"}
    how = "no row failure=new, node=x yet.*--results=docs/results"

    with pytest.raises(AssertionError, match=how):
        matrix_rows.minimum_count("API faults", **new)
    with pytest.raises(AssertionError, match=how):
        matrix_rows.require_rows("API faults", [new])


def test_a_row_that_no_test_counts_is_named() -> None:
    *rest, last = [
        {"change": row["change"]} for row in matrix_rows.published_rows("double strikes")
    ]

    with pytest.raises(AssertionError, match=f"which you remove: change={last['change']}$"):
        matrix_rows.require_rows("double strikes", rest)
