"""``mig-manager doctor`` on real GPUs: it observes and changes nothing."""

import pytest

from mig_manager.cli import command_settings, parser
from mig_manager.cli.doctor import checks, doctor

pytestmark = pytest.mark.gpu


def test_doctor_checks_every_gpu_without_an_internal_error() -> None:
    settings = command_settings.doctor_settings(parser.parse(["doctor", "--timeout-s", "60"]), {})

    report = doctor.examine(settings)

    found = {finding.check.name: finding for finding in report.findings}
    if found["driver"].verdict is checks.Verdict.FAIL:
        pytest.skip(f"no NVIDIA driver here: {found['driver'].found}")
    assert set(found) == {check.name for check in doctor.CHECKS}
    assert not [each for each in report.findings if "the check failed" in each.found]
    assert found["gpu-processes"].verdict is not checks.Verdict.SKIPPED
