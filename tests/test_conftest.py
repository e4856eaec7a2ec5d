"""What ``conftest.py`` does for every test."""

import pytest

from tests import conftest


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
