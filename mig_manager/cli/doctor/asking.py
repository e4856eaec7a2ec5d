"""How checks ask: each fact once, each check in a thread of its own and with a deadline."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_thread
from mig_manager.cli.doctor import findings

_Fact = TypeVar("_Fact")


class NotAskedError(Exception):
    """There is nothing to check here, and that is no failure; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One thing that a check found."""

    verdict: findings.Verdict
    text: str
    remedy: str = ""
    """Empty: what the check says."""


Look = Callable[[], Sequence[Found]]


def ok(text: str) -> Found:
    """Return that something is as it should be."""
    return Found(verdict=findings.Verdict.OK, text=text)


def warn(text: str, remedy: str = "") -> Found:
    """Return that something is not as it should be, and yet works."""
    return Found(verdict=findings.Verdict.WARN, text=text, remedy=remedy)


def fail(text: str, remedy: str = "") -> Found:
    """Return that something does not work."""
    return Found(verdict=findings.Verdict.FAIL, text=text, remedy=remedy)


def skipped(text: str) -> Found:
    """Return why something was not looked at."""
    return Found(verdict=findings.Verdict.SKIPPED, text=text)


class Once(Generic[_Fact]):
    """A fact that several checks need: asked by the first, and waited for by the others.

    Args:
        ask: Gets it; may fail, and does so for all.
        what: What it is, for checks that cannot go on without it.
    """

    def __init__(self, ask: Callable[[], _Fact], *, what: str) -> None:
        self._ask = ask
        self._what = what
        self._lock = threading.Lock()
        self._answer: concurrent.futures.Future[_Fact] | None = None

    def get(self) -> _Fact:
        """Return the fact.

        Raises:
            Exception: What asking raised.
        """
        with self._lock:
            is_first = self._answer is None
            answer = self._answer = self._answer or concurrent.futures.Future()
        if is_first:
            try:
                answer.set_result(self._ask())
            except BaseException as error:  # noqa: BLE001 - raised again for whoever asks
                answer.set_exception(error)
        return answer.result()

    def needed(self) -> _Fact:
        """Return the fact, for a check that is about something else.

        Raises:
            NotAskedError: It cannot be had; why, the check says that is about it.
        """
        try:
            return self.get()
        except NotAskedError:
            raise
        except Exception as error:
            raise NotAskedError(f"not known: {self._what}") from error

    def if_told(self) -> _Fact | None:
        """Return the fact, or None where it cannot be had."""
        try:
            return self.needed()
        except NotAskedError:
            return None


def run(looks: Mapping[findings.Check, Look], *, timeout_s: float) -> findings.Report:
    """Do all checks at once; one that hangs or breaks is a finding and hides no other.

    Args:
        looks: What to look at.
        timeout_s: How long all of it may take.
    """
    deadline = time.monotonic() + timeout_s
    answers = {check: gpu_thread.started(look) for check, look in looks.items()}
    concurrent.futures.wait(answers.values(), timeout=timeout_s)
    return findings.Report(
        findings=tuple(
            findings.Finding(
                check=check, verdict=found.verdict, found=found.text, own_remedy=found.remedy
            )
            for check in findings.Check
            if check in answers
            for found in _told(answers[check], deadline, timeout_s)
        )
    )


def _told(
    answer: concurrent.futures.Future[Sequence[Found]], deadline: float, timeout_s: float
) -> Sequence[Found]:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        return (fail(f"no answer within {timeout_s:g} s"),)
    except NotAskedError as why:
        return (skipped(str(why)),)
    except errors.MigManagerError as error:
        return (fail(error.message, _remedy(error)),)
    except Exception as error:  # noqa: BLE001 - one check that breaks must not hide the others
        what = f"the check broke: {type(error).__name__}: {error}"
        return (fail(what, errors.Reason.INTERNAL.remedy),)


def _remedy(error: errors.MigManagerError) -> str:
    """Return what to do; empty where the check knows better which file or option it was."""
    is_vague = error.reason in (errors.Reason.USAGE, errors.Reason.INVALID_CONFIG)
    return "" if is_vague else error.reason.remedy
