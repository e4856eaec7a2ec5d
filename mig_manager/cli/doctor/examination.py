"""All checks of ``doctor``, in parallel."""

import dataclasses
import time
from collections.abc import Sequence

from mig_manager import errors, reasons
from mig_manager.adapters.host import call_thread
from mig_manager.cli.doctor import cluster, machine
from mig_manager.cli.doctor.doctor_facts import Check, Facts, SkippedError
from mig_manager.cli.doctor.doctor_report import (
    CheckResult,
    DoctorReport,
    Finding,
    fail,
    skipped,
)

CHECKS = (*machine.CHECKS, *cluster.CHECKS)  # all checks, in the order of the report
MARGIN_S = 3.0
"""Extra time beyond a check's time-out, to start a process and to kill a hanging one."""
_VAGUE = (reasons.Reason.USAGE, reasons.Reason.INVALID_CONFIG)
"""For these reasons the check's own remedy is better: it names the file or the option."""


def examine(checks: Sequence[Check], facts: Facts, *, timeout_s: float) -> DoctorReport:
    """Run checks in parallel within one time-out; a failing check does not affect the others."""
    deadline = time.monotonic() + timeout_s
    threads = {
        check: call_thread.CallThread(lambda check=check: tuple(check.run(facts)))  # type: ignore[misc]
        for check in checks
    }

    def findings(check: Check) -> Sequence[Finding]:
        try:
            return threads[check].result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return (fail(f"no answer within {timeout_s:g} s"),)
        except SkippedError as why:
            return (skipped(str(why)),)
        except errors.MigManagerError as error:
            remedy = "" if error.reason in _VAGUE else str(error.reason.remedy_at_shell)
            return (fail(error.message, remedy),)
        except Exception as error:  # noqa: BLE001 - a failing check must not hide the others
            what = f"the check failed: {type(error).__name__}: {error}"
            return (fail(what, reasons.Reason.INTERNAL.remedy),)

    listed = []
    for check in checks:
        for finding in findings(check):
            is_problem = finding.result in (CheckResult.WARN, CheckResult.FAIL)
            remedy = (finding.remedy or check.remedy) if is_problem else ""
            listed.append((check.name, dataclasses.replace(finding, remedy=remedy)))
    return DoctorReport(findings=tuple(listed))
