"""``mig-manager doctor``: check this node, change nothing, and say what to fix."""

import dataclasses
import textwrap
import time
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.nvml import hung_call
from mig_manager.cli import command_settings, console, doctor_checks, doctor_facts
from mig_manager.cli.doctor_facts import Check, Finding, Verdict
from mig_manager.core import bar, messages, picture

_MARGIN_S = 3.0
"""For a check to start a process, and to kill one that hangs, beyond its time-out."""
_VAGUE = (errors.Reason.USAGE, errors.Reason.INVALID_CONFIG)
"""The check's remedy names the file or the option; these reasons' do not."""
_TONES: Mapping[Verdict, bar.Tone] = {
    Verdict.OK: bar.Tone.GOOD,
    Verdict.WARN: bar.Tone.WARN,
    Verdict.FAIL: bar.Tone.BAD,
    Verdict.SKIPPED: bar.Tone.FAINT,
}


def run(chosen: command_settings.DoctorSettings, terminal: console.Console) -> bool:
    """Check this node and write what was found; return whether nothing fails."""
    report = examine(
        doctor_checks.CHECKS,
        doctor_facts.facts(chosen),
        timeout_s=chosen.timeout_s + _MARGIN_S,
    )
    terminal.answer(
        chosen.output_format.value,
        report.to_data,
        lambda: table(report, style=terminal.style(chosen.colour)),
    )
    return report.is_good


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What all checks found, in their order."""

    findings: tuple[tuple[Check, Finding], ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing fails."""
        return not self.count(Verdict.FAIL)

    def count(self, verdict: Verdict) -> int:
        """Return how many findings have this verdict."""
        return sum(finding.verdict is verdict for _, finding in self.findings)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "is_good": self.is_good,
            "counts": {verdict.value: self.count(verdict) for verdict in Verdict},
            "findings": [
                {
                    "check": check.name,
                    "verdict": finding.verdict.value,
                    "found": finding.text,
                    "remedy": finding.remedy,
                }
                for check, finding in self.findings
            ],
        }


def examine(checks: Sequence[Check], facts: doctor_facts.Facts, *, timeout_s: float) -> Report:
    """Run checks in parallel; one that hangs or fails does not affect the others.

    ``timeout_s`` is for them all.
    """
    deadline = time.monotonic() + timeout_s
    answers = {
        check: hung_call.CallThread(lambda check=check: tuple(check.run(facts)))  # type: ignore[misc]
        for check in checks
    }

    def findings(check: Check) -> Sequence[Finding]:
        try:
            return answers[check].result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return (doctor_facts.fail(f"no answer within {timeout_s:g} s"),)
        except doctor_facts.NotAskedError as why:
            return (doctor_facts.skipped(str(why)),)
        except errors.MigManagerError as error:
            remedy = "" if error.reason in _VAGUE else error.reason.remedy
            return (doctor_facts.fail(error.message, remedy),)
        except Exception as error:  # noqa: BLE001 - a failing check must not hide the others
            what = f"the check failed: {type(error).__name__}: {error}"
            return (doctor_facts.fail(what, errors.Reason.INTERNAL.remedy),)

    return Report(
        findings=tuple(
            (check, finding.with_remedy(check.remedy))
            for check in checks
            for finding in findings(check)
        )
    )


def table(report: Report, *, style: bar.Style) -> str:
    """Return the findings for people, each problem with its remedy below."""
    wide = max(len(check.name) for check in doctor_checks.CHECKS)
    margin = " " * (wide + 11)
    lines = [f"{'CHECK':<{wide}}  VERDICT  FOUND"]
    for check, finding in report.findings:
        parts = [finding.text] + ([f"remedy: {finding.remedy}"] if finding.remedy else [])
        first, *more = [row for part in parts for row in _wrapped(part, len(margin))]
        verdict = style.paint(f"{finding.verdict.value:<7}", _TONES[finding.verdict])
        lines.append(f"{check.name:<{wide}}  {verdict}  {first}")
        lines += [f"{margin}{text}" for text in more]
    counts = [f"{n} {verdict.value}" for verdict in Verdict if (n := report.count(verdict))]
    return "\n".join([*lines, "", ", ".join(counts)])


def _wrapped(text: str, margin: int) -> list[str]:
    # Names from the API and from processes end up here; they must not drive the terminal.
    return textwrap.wrap(
        messages.printable(text, " "),
        picture.WIDTH - margin,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
