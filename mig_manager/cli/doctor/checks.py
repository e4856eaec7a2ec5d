"""What a check of ``doctor`` is: facts in, findings out; all checks run at once."""

import concurrent.futures
import dataclasses
import enum
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.adapters.nvml import hung_call
from mig_manager.adapters.nvml import processes as nvml_processes
from mig_manager.cli import command_settings
from mig_manager.core import model
from mig_manager.core.node import cluster

_Fact = TypeVar("_Fact")


class Verdict(enum.Enum):
    """What a finding means."""

    OK = "ok"
    WARN = "warn"
    """Works, but something may fail later."""
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not checked; the finding says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a check returns."""

    verdict: Verdict
    text: str
    remedy: str = ""
    """Empty: the remedy of the check."""


def ok(text: str) -> Found:
    """Return that something is in order."""
    return Found(verdict=Verdict.OK, text=text)


def warn(text: str, remedy: str = "") -> Found:
    """Return that something works, but may fail later."""
    return Found(verdict=Verdict.WARN, text=text, remedy=remedy)


def fail(text: str, remedy: str = "") -> Found:
    """Return that something does not work."""
    return Found(verdict=Verdict.FAIL, text=text, remedy=remedy)


def skipped(text: str) -> Found:
    """Return why something was not checked."""
    return Found(verdict=Verdict.SKIPPED, text=text)


class NotAskedError(Exception):
    """There is nothing to check, which is no failure; the text says why."""


class Once(Generic[_Fact]):
    """A fact that several checks need: read by the first, and awaited by the others.

    Args:
        ask: Reads it; its error is raised in all checks.
        what: Names it in findings of checks that need it.
    """

    def __init__(self, ask: Callable[[], _Fact], *, what: str) -> None:
        self._ask = ask
        self._what = what
        self._lock = threading.Lock()
        self._answer: concurrent.futures.Future[_Fact] | None = None

    def get(self) -> _Fact:
        """Return the fact.

        Raises:
            Exception: As reading it raised.
        """
        with self._lock:
            is_first = self._answer is None
            answer = self._answer = self._answer or concurrent.futures.Future()
        if is_first:
            try:
                answer.set_result(self._ask())
            except BaseException as error:  # noqa: BLE001 - raised in every check
                answer.set_exception(error)
        return answer.result()

    def needed(self) -> _Fact:
        """Return the fact, for a check that is about something else.

        Raises:
            NotAskedError: It cannot be read; another check reports why.
        """
        try:
            return self.get()
        except NotAskedError:
            raise
        except Exception as error:
            raise NotAskedError(f"not known: {self._what}") from error

    def if_known(self) -> _Fact | None:
        """Return the fact, or None if it cannot be read."""
        try:
            return self.needed()
        except NotAskedError:
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What checks read, each fact once."""

    settings: command_settings.DoctorSettings
    gpus: Once[model.ObservedGpus]
    inspection: Once[nvml_processes.Inspection]
    kube: Once[api.KubeApi]
    node: Once[cluster.NodeView]
    pods: Once[tuple[cluster.Pod, ...]]
    """Of this node."""
    allocatable: Once[Mapping[str, frozenset[str]]]
    """Device ids that kubelet can schedule, by resource."""
    own_pod_uid: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A row of the lists of checks; name, meaning and remedy are in docs/doctor.md."""

    name: str
    """A public contract."""
    meaning: str
    """What is true if nothing is found."""
    remedy: str
    """What to do if the finding has no remedy of its own."""
    run: Callable[[Facts], Sequence[Found]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found."""

    check: Check
    verdict: Verdict
    found: str
    """One sentence or less."""
    own_remedy: str = ""
    """Empty: the remedy of the check."""

    @property
    def remedy(self) -> str:
        """What to do; empty for nothing."""
        if self.verdict in (Verdict.OK, Verdict.SKIPPED):
            return ""
        return self.own_remedy or self.check.remedy

    def to_data(self) -> dict[str, str]:
        """Return plain data for JSON and YAML."""
        return {
            "check": self.check.name,
            "verdict": self.verdict.value,
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What all checks found, in their order."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing fails."""
        return all(finding.verdict is not Verdict.FAIL for finding in self.findings)

    def count(self, verdict: Verdict) -> int:
        """Return how many findings have this verdict."""
        return sum(finding.verdict is verdict for finding in self.findings)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "is_good": self.is_good,
            "counts": {verdict.value: self.count(verdict) for verdict in Verdict},
            "findings": [finding.to_data() for finding in self.findings],
        }


def run(checks: Sequence[Check], facts: Facts, *, timeout_s: float) -> Report:
    """Run all checks in parallel; one that hangs or fails does not affect the others.

    Args:
        checks: In the order of the report.
        facts: What they read.
        timeout_s: Deadline of them all.
    """
    deadline = time.monotonic() + timeout_s
    answers = {
        check: hung_call.CallThread(functools.partial(check.run, facts)) for check in checks
    }

    return Report(
        findings=tuple(
            Finding(check=check, verdict=found.verdict, found=found.text, own_remedy=found.remedy)
            for check, answer in answers.items()
            for found in _found(answer, deadline, timeout_s)
        )
    )


def _found(
    answer: hung_call.CallThread[Sequence[Found]], deadline: float, timeout_s: float
) -> Sequence[Found]:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return (fail(f"no answer within {timeout_s:g} s"),)
    except NotAskedError as why:
        return (skipped(str(why)),)
    except errors.MigManagerError as error:
        return (fail(error.message, _remedy(error)),)
    except Exception as error:  # noqa: BLE001 - a failing check must not hide the others
        what = f"the check failed: {type(error).__name__}: {error}"
        return (fail(what, errors.Reason.INTERNAL.remedy),)


def _remedy(error: errors.MigManagerError) -> str:
    """Return what to do; empty if the check names the file or option."""
    is_vague = error.reason in (errors.Reason.USAGE, errors.Reason.INVALID_CONFIG)
    return "" if is_vague else error.reason.remedy
