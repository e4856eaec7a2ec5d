"""What holds for every test."""

import collections

import hypothesis
import pytest

# A slow machine is no bug.
hypothesis.settings.register_profile(
    "patient",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have counted: their properties, a section for each name."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    counted: dict[str, list[str]] = collections.defaultdict(list)
    for report in reports:
        if report.when == "call":
            for name, value in report.user_properties:
                counted[name].append(str(value))
    for name, lines in sorted(counted.items()):
        terminalreporter.section(name)
        for line in sorted(lines):
            terminalreporter.line(line)
