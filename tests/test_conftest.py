"""What ``conftest.py`` does for every test."""

import pathlib
import subprocess
import sys

import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTEST = "python -m pytest --noconftest -p tests.conftest -n 0 --timeout 1"
HANGING = """
import threading

def other_thread():
    threading.Event().wait()

def test_it():
    threading.Thread(target=other_thread, daemon=True).start()
    try:
        threading.Event().wait()
    finally:
"""


@pytest.mark.parametrize(
    ("clean_up", "says"),
    [
        pytest.param("pass", "1 failed", id="test"),
        pytest.param("threading.Event().wait()", "Timeout (0:00:02)!", id="clean-up"),
    ],
)
def test_what_hangs_ends_with_the_stacks_of_all_threads(
    tmp_path: pathlib.Path, clean_up: str, says: str
) -> None:
    path = tmp_path / "test_hanging.py"
    path.write_text(f"{HANGING}        {clean_up}\n")

    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, *PYTEST.split()[1:], str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert says in output
    assert "in other_thread" in output
    assert "test_it" in output


def test_a_skipped_test_has_failed_in_ci_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped = pytest.TestReport(
        nodeid="test",
        location=("test.py", 1, "test"),
        keywords={},
        outcome="skipped",
        longrepr="kubectl is not installed",
        when="setup",
    )
    monkeypatch.delenv("CI", raising=False)
    assert conftest._failed_where_skipped(skipped).skipped

    monkeypatch.setenv("CI", "true")
    report = conftest._failed_where_skipped(skipped)

    assert report.failed
    assert "kubectl is not installed" in str(report.longrepr)
