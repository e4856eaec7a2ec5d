"""Let every request of the agent fail once, in every way of ``FAILURES``.

The cases are the requests that several undisturbed changes have in common, with a few of the
repeated lists of pods. The run must succeed, or fail with the reason of the failure, and then the
next attempt must succeed. Every fault must reach its request.
"""

import collections
import contextlib
import dataclasses
import functools
import http
from typing import NamedTuple

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.sandbox.node import objects
from testkit import apiserver
from tests.faults import api_node
from tests.faults.api_node import GOOD, Request
from tests.rigs.matrices import matrix_rows
from tests.rigs.shell import lost_stderr

OPERATOR, PLAIN = objects.DeployStyle.GPU_OPERATOR, objects.DeployStyle.PLAIN
_MATRIX = "API faults"
_ALWAYS = {
    ("create", "events"): 2,
    ("create", "pods/eviction"): 2,
    ("delete", "pods"): 1,
    ("get", "nodes"): 0,
    ("list", "poddisruptionbudgets"): 1,
    ("list", "pods"): 6,
    ("patch", "nodes"): 7,
    ("patch", "nodes/status"): 2,
}
"""How many of a kind every reconfiguration makes, however it is scheduled."""
_FURTHER = 2  # how many more there may be of what is written: each is a matter of milliseconds
_EVENT = Request("create", "events", _ALWAYS["create", "events"])


class ApiFailure(NamedTuple):
    """A way to fail, and the reason that a run may end with because of it."""

    fault: apiserver.Fault
    reason: reasons.Reason

    @property
    def api_timeout_s(self) -> float:
        """How long the agent waits for an answer."""
        return api_node.SILENCE_TIMEOUT_S if self.fault.stall else api_node.REQUEST_TIMEOUT_S

    def at(self, request: Request) -> apiserver.Fault:
        """Return the fault that strikes one request of the agent."""
        return dataclasses.replace(
            self.fault,
            token=api_node.TOKEN,
            verb=request.verb,
            resource=request.resource,
            skip=request.nth - 1,
        )

    def reasons(self, request: Request) -> set[reasons.Reason]:
        """Return what a run may end with because of it."""
        # A server that asks for a longer wait than the drain's time-out, or that reports a pod
        # deleted that then stays.
        is_misled = self.fault.retry_after_s or self.fault.status == http.HTTPStatus.NOT_FOUND
        if request.resource == "pods/eviction" and is_misled:
            return {self.reason, reasons.Reason.DRAIN_TIMEOUT}
        return {self.reason}


_REASONS = {403: reasons.Reason.FORBIDDEN}
_REASONS |= dict.fromkeys((404, 409, 410), reasons.Reason.API_ERROR)
FAILURES = {
    name: ApiFailure(fault, _REASONS.get(fault.status or 0, reasons.Reason.API_UNAVAILABLE))
    for name, fault in apiserver.FAULTS.items()
}
ON_PLAIN_NODES = {
    "403": "",
    "no-answer": "",
    "409": "full-disk",
    "reset-when-done": "closed-pipe",
    "500": "stalled-reader",
}
"""Failures on a node without the operator, with the way in which the log is lost meanwhile."""
LIST, WATCH, GET = (Request(verb, "nodes", 1) for verb in ("list", "watch", "get"))
"""The first requests of an agent: the node, its watch, and an interrupted run."""


def requests(stage: api_node.InProcessStage) -> list[Request]:
    """Return the requests that every reconfiguration makes, however it is scheduled.

    How often the agent reads the node, which it also watches, and whether kubelet or the agent is
    the first to report that devices are gone, depends on when the plugin is ready. So the numbers
    are written down, and compared with those of three reconfigurations.
    """
    rounds = []
    for _ in range(3):
        stage.occupy()
        stage.server.log.clear()
        stage.reconfigure()
        # Events are published in the background.
        stage.wait(lambda: _EVENT in stage.requests(), "the Event of the end")
        rounds.append(set(stage.requests()))
    made = set.intersection(*rounds)
    counts = collections.Counter(each[:2] for each in made)
    unseen = {kind for kind, written in _ALWAYS.items() if written} - counts.keys()
    # The operator's plugin is paused by its label, another one by deleting its pod.
    assert unseen <= {("delete", "pods")}
    for kind, count in counts.items():
        written = _ALWAYS[kind]
        is_poll = kind[0] in ("get", "list")
        assert written <= count, f"{count} of {kind}"
        assert is_poll or count <= written + _FURTHER, f"{count} of {kind}"
    return sorted(each for each in made if each.nth <= _ALWAYS[each[:2]])


def end_of(stage: api_node.InProcessStage, may_fail_with: set[reasons.Reason]) -> str:
    """Return the end of a case; ``may_fail_with`` has a reason for every failure."""
    ends, lost = stage.ends()
    assert stage.unrestored_on_node() == []
    assert ends, "no run has ended"
    assert ends[-1] in GOOD
    bad = [reason for reason in (*ends, *lost) if reason not in GOOD]
    assert set(bad) <= may_fail_with
    assert len(bad) <= 1, "one failure may cost one run and no more"
    if not bad:
        return "went on"
    return "outcome unknown, then tried again" if lost else "failed, then tried again"


def strike(stage: api_node.InProcessStage, failure: ApiFailure, request: Request) -> str | None:
    """Let a request fail; return the end, or None if the agent did not make the request."""
    stage.occupy()
    stage.server.inject(failure.at(request))
    try:
        stage.reconfigure()
        end = end_of(stage, failure.reasons(request))
    except (AssertionError, errors.NotReadyError) as error:
        raise AssertionError(f"{request}: {error}") from error
    if request.resource == "events":
        # Published in the background, and some only in some runs.
        with contextlib.suppress(errors.NotReadyError):
            stage.wait(lambda: not stage.server.faults_waiting(), "it", timeout_s=5)
    if stage.server.faults_waiting() == 0:
        return end
    stage.server.clear_faults()
    return None


def fail_requests(
    note: matrix_rows.Note,
    name: str,
    style: objects.DeployStyle,
    *,
    start: int = 0,
    every: int = 1,
    listen: lost_stderr.Listen = structlog.testing.capture_logs,
) -> None:
    failure = FAILURES[name]
    ends: collections.Counter[str] = collections.Counter()
    row = matrix_rows.MatrixRow(_MATRIX, failure=name, node=style.value)
    with api_node.stage_at_rest(
        style=style, api_timeout_s=failure.api_timeout_s, listen=listen
    ) as stage:
        cases = requests(stage)
        for request in matrix_rows.sample(cases, every, start=start):
            if end := row.until_struck(
                request, functools.partial(strike, stage, failure, request)
            ):
                ends[end] += 1
            is_quiet = request.resource in ("events", "nodes/status")
            if is_quiet and failure.reason is reasons.Reason.FORBIDDEN:
                # An agent that may not write one of these is quiet for minutes: take a new one.
                stage.stop_agent()
                stage.start_agent()
    counts = {"played again": row.played_again, "ends": dict(sorted(ends.items()))}
    row.assert_complete(note, counts, of=len(cases))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_api_request_may_fail_once_in_any_way_and_the_layout_is_applied(
    name: str, record_property: matrix_rows.Note, pytestconfig: pytest.Config
) -> None:
    # Each way to fail meets other requests, and all of them together meet all.
    every = pytestconfig.getoption("every")
    fail_requests(
        record_property, name, OPERATOR, start=[*FAILURES].index(name) % every, every=every
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), ON_PLAIN_NODES.items())
def test_api_request_may_fail_once_with_a_taint_or_a_lost_log(
    name: str, way: str, record_property: matrix_rows.Note
) -> None:
    lost: collections.Counter[str] = collections.Counter()
    listen = functools.partial(lost_stderr.logging_lost, way, lost)
    fail_requests(
        record_property, name, PLAIN, listen=listen if way else structlog.testing.capture_logs
    )
    assert bool(lost[way]) is bool(way)


def test_the_published_results_are_of_present_failures() -> None:
    played = [
        *((name, OPERATOR) for name in FAILURES),
        *((name, PLAIN) for name in ON_PLAIN_NODES),
    ]

    assert matrix_rows.require_rows(
        _MATRIX, [{"failure": name, "node": style.value} for name, style in played]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_label_is_served_though_first_requests_watch_or_list_fail(name: str) -> None:
    failure = FAILURES[name]
    with api_node.stage_at_rest(api_timeout_s=failure.api_timeout_s) as stage:
        for request in (LIST, WATCH, GET):
            stage.stop_agent()
            stage.server.inject(failure.at(request))
            stage.start_agent()
            stage.reconfigure()
            assert stage.server.faults_waiting() == 0, request
            end_of(stage, {failure.reason})
        for again in (WATCH, LIST):
            stage.server.inject(apiserver.Fault(token=api_node.TOKEN, verb="watch", status=410))
            stage.server.inject(failure.at(again))
            # The watch is renewed every second or so.
            stage.wait(lambda: stage.server.faults_waiting() == 0, "the faults")
            stage.reconfigure()
            end_of(stage, {failure.reason})


def test_a_label_is_served_after_a_watch_that_went_silent() -> None:
    with api_node.stage_at_rest() as stage:
        stage.server.inject(apiserver.Fault(token=api_node.TOKEN, verb="watch", stall=True))
        stage.wait(lambda: stage.server.faults_waiting() == 0, "the fault")
        stage.reconfigure()
        assert stage.unrestored_on_node() == []
