"""``mig-manager doctor`` on real GPUs: it observes and changes nothing."""

import pytest

from mig_manager.cli import registry
from mig_manager.cli.doctor import doctor_facts, doctor_report, doctor_settings, examination
from mig_manager.cli.toolkit import parser

pytestmark = pytest.mark.gpu


def test_doctor_checks_every_gpu_without_an_internal_error() -> None:
    settings = doctor_settings.DoctorSettings.read(
        parser.parse(registry.PROGRAM, ["doctor", "--timeout-s", "60"]), {}
    )

    report = examination.examine(
        examination.CHECKS, doctor_facts.facts(settings), timeout_s=settings.timeout_s
    )

    findings = dict(report.findings)
    if findings["driver"].result is doctor_report.CheckResult.FAIL:
        pytest.skip(f"no NVIDIA driver here: {findings['driver'].text}")
    assert set(findings) == {check.name for check in examination.CHECKS}
    assert not [each for _, each in report.findings if "the check failed" in each.text]
    assert findings["gpu-processes"].result is not doctor_report.CheckResult.SKIPPED
