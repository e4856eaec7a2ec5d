"""``mig-manager doctor`` on real GPUs: it observes and changes nothing."""

import pytest

from mig_manager.cli import command_settings, parser
from mig_manager.cli.doctor import doctor, findings

pytestmark = pytest.mark.gpu


def test_doctor_checks_every_gpu_without_an_internal_error() -> None:
    settings = command_settings.doctor_settings(parser.parse(["doctor", "--timeout-s", "60"]), {})

    report = doctor.examine(settings)

    found = {finding.check: finding for finding in report.findings}
    if found[findings.Check.DRIVER].verdict is findings.Verdict.FAIL:
        pytest.skip(f"no NVIDIA driver here: {found[findings.Check.DRIVER].found}")
    assert set(found) == set(findings.Check)
    assert not [each for each in report.findings if "the check broke" in each.found]
    assert found[findings.Check.HOLDERS].verdict is not findings.Verdict.SKIPPED
