"""A test that skips itself: a person lacks something, and CI must have it."""

import pytest

from tests import conftest


def skipped() -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="test",
        location=("test.py", 1, "test"),
        keywords={},
        outcome="skipped",
        longrepr="kubectl is not installed",
        when="setup",
    )


def test_in_ci_a_skipped_test_has_failed_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "true")

    report = conftest._failed_where_skipped(skipped())

    assert report.failed
    assert "kubectl is not installed" in str(report.longrepr)


def test_elsewhere_a_skipped_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    assert conftest._failed_where_skipped(skipped()).skipped
