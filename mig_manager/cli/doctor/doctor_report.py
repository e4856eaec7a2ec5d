"""The report of ``mig-manager doctor``, for people and for programs."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence

from mig_manager.core import messages
from mig_manager.core.answers import check_answers
from mig_manager.core.display import styles, tables


class CheckResult(enum.Enum):
    """The result of a check of a node."""

    OK = "ok"
    WARN = "warn"  # works now, but may fail later
    FAIL = "fail"
    SKIPPED = "skipped"  # not checked; the finding says why


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    result: CheckResult
    text: str  # one sentence or less
    remedy: str = ""  # what to do; empty if nothing is wrong, or if the check's own remedy applies


ok = functools.partial(Finding, CheckResult.OK)
warn = functools.partial(Finding, CheckResult.WARN)
fail = functools.partial(Finding, CheckResult.FAIL)
skipped = functools.partial(Finding, CheckResult.SKIPPED)


def persistence_off(gpus: Sequence[str]) -> Finding:
    """Say that a reset switched off a persistence mode that could not be restored."""
    return warn(
        f"the persistence mode of {messages.list_names(gpus)}, which a reset switched off, "
        "could not be restored yet",
        "Run 'nvidia-smi -pm 1 -i UUID', or let the next change of the GPUs switch it on.",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The findings of all checks, in order."""

    findings: tuple[tuple[str, Finding], ...]  # with the name of the check

    @property
    def is_good(self) -> bool:
        """Whether no check failed."""
        return not self.count(CheckResult.FAIL)

    def count(self, result: CheckResult) -> int:
        """Return how many findings have this result."""
        return sum(finding.result is result for _, finding in self.findings)

    def to_data(self) -> check_answers.Doctor:
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Doctor",
            "is_good": self.is_good,
            "counts": {result.value: self.count(result) for result in CheckResult},
            "findings": [
                {
                    "check": check,
                    "result": finding.result.value,
                    "found": finding.text,
                    "remedy": finding.remedy,
                }
                for check, finding in self.findings
            ],
        }


_TONES: Mapping[CheckResult, styles.Tone] = {
    CheckResult.OK: styles.Tone.GOOD,
    CheckResult.WARN: styles.Tone.WARN,
    CheckResult.FAIL: styles.Tone.BAD,
    CheckResult.SKIPPED: styles.Tone.FAINT,
}


def table(report: DoctorReport, *, style: styles.Style) -> str:
    """Return the findings for people, with remedies below the problems."""
    rows: list[tables.Row] = []
    skipped: dict[str, list[str]] = collections.defaultdict(list)
    for check, finding in report.findings:
        if finding.result is CheckResult.SKIPPED:
            skipped[finding.text].append(check)
            continue
        rows.append((check, (finding.result.value, _TONES[finding.result]), finding.text))
        rows += [("", "", f"remedy: {finding.remedy}")] if finding.remedy else []
    # One cause, such as a missing kubeconfig, is one row.
    for why, checks in skipped.items():
        name = checks[0] if len(checks) == 1 else f"{len(checks)} checks"
        text = why if len(checks) == 1 else f"{why}: {', '.join(checks)}"
        result = CheckResult.SKIPPED.value, _TONES[CheckResult.SKIPPED]
        rows.append((name, result, text))
    lines = tables.columns(("CHECK", "RESULT", "FOUND"), rows, style=style)
    counts = [f"{n} {result.value}" for result in CheckResult if (n := report.count(result))]
    return "\n".join([*lines, "", ", ".join(counts)])
