"""Requests of the agent fail once each, in every way that ``FAILURES`` lists.

Struck are those requests that each of several undisturbed reconfigurations makes; of the repeated
looks at the pods some. Either the run goes on as if nothing had been, or it ends with the reason
that the failure stands for and the agent's own next try succeeds. A case counts only if the
server's fault says that it has struck, and every case must count.
"""

import collections
import dataclasses
import functools
import http
from collections.abc import Callable, Collection, Mapping

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.sandbox.node import node_options
from testkit import apiserver
from tests import lost_stderr
from tests.faults import api_node

GOOD = api_node.GOOD
Note = Callable[[str, object], None]
OPERATOR, PLAIN = node_options.DeployStyle.GPU_OPERATOR, node_options.DeployStyle.PLAIN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A way to fail, and the reason that a run may end with because of it."""

    fault: apiserver.Fault
    reason: errors.Reason = errors.Reason.API_UNAVAILABLE

    @property
    def api_timeout_s(self) -> float:
        """How long the agent waits for an answer."""
        return api_node.SILENCE_TIMEOUT_S if self.fault.stall else api_node.REQUEST_TIMEOUT_S

    def at(self, request: api_node.Request) -> apiserver.Fault:
        """Return the fault that strikes one request of the agent."""
        return dataclasses.replace(
            self.fault,
            token=api_node.TOKEN,
            verb=request.verb,
            resource=request.resource,
            skip=request.nth - 1,
        )

    def reasons(self, request: api_node.Request) -> tuple[errors.Reason, ...]:
        """Return what a run may end with because of it."""
        if request.resource != "pods/eviction":
            return (self.reason,)
        # A server that asks for a longer wait than the drain's time-out, or that reports a pod
        # deleted that then stays.
        is_misled = self.fault.retry_after_s or self.fault.status == http.HTTPStatus.NOT_FOUND
        return (self.reason, errors.Reason.DRAIN_TIMEOUT) if is_misled else (self.reason,)


_MOST_PLAYS = 5
"""A wait may be over before its n-th poll."""

FAILURES: Mapping[str, Failure] = {
    "401": Failure(fault=apiserver.Fault(status=401), reason=errors.Reason.FORBIDDEN),
    "403": Failure(fault=apiserver.Fault(status=403), reason=errors.Reason.FORBIDDEN),
    "404": Failure(fault=apiserver.Fault(status=404), reason=errors.Reason.API_ERROR),
    "409": Failure(fault=apiserver.Fault(status=409), reason=errors.Reason.API_ERROR),
    "410": Failure(fault=apiserver.Fault(status=410), reason=errors.Reason.API_ERROR),
    "429": Failure(fault=apiserver.Fault(status=429)),
    "429-retry-after": Failure(fault=apiserver.Fault(status=429, retry_after_s=1)),
    "429-retry-much-later": Failure(fault=apiserver.Fault(status=429, retry_after_s=60)),
    "500": Failure(fault=apiserver.Fault(status=500)),
    "503": Failure(fault=apiserver.Fault(status=503)),
    "reset": Failure(fault=apiserver.Fault(reset=True)),
    "reset-when-done": Failure(fault=apiserver.Fault(reset=True, is_carried_out=True)),
    "500-when-done": Failure(fault=apiserver.Fault(status=500, is_carried_out=True)),
    "no-answer": Failure(fault=apiserver.Fault(stall=True)),
    "no-answer-when-done": Failure(fault=apiserver.Fault(stall=True, is_carried_out=True)),
    "cut-off": Failure(fault=apiserver.Fault(truncate=True)),
    "garbage": Failure(fault=apiserver.Fault(garbles=True)),
}
FOLLOWING = (
    api_node.Request(verb="list", resource="nodes", nth=1),
    api_node.Request(verb="watch", resource="nodes", nth=1),
    api_node.Request(verb="get", resource="nodes", nth=1),
)
"""What an agent asks first: the node, its watch, and what an interrupted run has left."""


def requests(stage: api_node.Stage, *, rounds: int = 3) -> list[api_node.Request]:
    """Return the requests that every reconfiguration makes, however it is scheduled."""
    common: set[api_node.Request] = set()
    for number in range(rounds):
        stage.occupy()
        stage.server.log.clear()
        stage.reconfigure()
        asked = set(stage.asked())
        common = common & asked if number else asked
    stage.heard.take()
    return sorted((each for each in common if each.nth in chosen(each)), key=str)


def chosen(request: api_node.Request) -> Collection[int]:
    """Return which of its kind to strike: all, but of the many looks at the pods only some."""
    looks = ("list", "pods")
    return (1, 2, 3, 5, 8, 12) if (request.verb, request.resource) == looks else range(1, 99)


def outcome(stage: api_node.Stage, *passing: errors.Reason) -> str:
    """Return in a word how one case ended; ``passing`` are the reasons a run may fail with."""
    ends, lost = stage.heard.take()
    assert stage.taken() == []
    assert ends, "no run has ended"
    assert ends[-1] in GOOD
    bad = [reason for reason in (*ends, *lost) if reason not in GOOD]
    assert set(bad) <= set(passing)
    assert len(bad) <= 1, "one failure may cost one run and no more"
    if not bad:
        return "went on"
    return "outcome unknown, then tried again" if lost else "failed, then tried again"


def strike(stage: api_node.Stage, failure: Failure, request: api_node.Request) -> str:
    """Reconfigure with one request failing; return how it ended, or nothing if none was struck."""
    stage.occupy()
    stage.server.inject(failure.at(request))
    stage.reconfigure()
    is_struck = stage.server.faults_waiting() == 0
    stage.server.clear_faults()
    word = outcome(stage, *failure.reasons(request))
    return word if is_struck else ""


def play(
    note: Note,
    name: str,
    style: node_options.DeployStyle,
    *,
    every: int = 1,
    listen: api_node.Listen = structlog.testing.capture_logs,
) -> None:
    failure = FAILURES[name]
    counts: collections.Counter[str] = collections.Counter()
    plays, missed = 0, []
    with api_node.staged(style=style, api_timeout_s=failure.api_timeout_s, listen=listen) as stage:
        tried = requests(stage)[::every]
        for request in tried:
            word = ""
            for _ in range(_MOST_PLAYS):
                plays += 1
                try:
                    word = strike(stage, failure, request)
                except (AssertionError, errors.NotReadyError) as error:
                    raise AssertionError(f"{request}: {error}") from error
                if word:
                    counts[word] += 1
                    break
            else:
                missed.append(str(request))
            if request.resource == "events" and failure.reason is errors.Reason.FORBIDDEN:
                # An agent that may not publish Events is quiet for minutes: take a new one.
                stage.stop_agent()
                stage.start_agent()
    struck = counts.total()
    note(
        "API faults" if every == 1 else "API faults, a sample",
        {
            "failure": name,
            "node": style.value,
            "tried": len(tried),
            "struck": struck,
            "played again": plays - len(tried),
            "ends": dict(sorted(counts.items())),
        },
    )
    assert missed == []
    assert tried
    assert struck == len(tried)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_any_request_may_fail_once_in_any_way_and_the_layout_comes_into_force(
    name: str, record_property: Note
) -> None:
    play(record_property, name, OPERATOR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["403", "409", "500", "reset-when-done", "no-answer"])
def test_any_request_may_fail_once_where_a_taint_holds_the_plugin_off(
    name: str, record_property: Note
) -> None:
    play(record_property, name, PLAIN)


def test_some_requests_may_fail_once_and_the_layout_comes_into_force(
    record_property: Note,
) -> None:
    play(record_property, "409", OPERATOR, every=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [("409", "full-disk"), ("reset-when-done", "closed-pipe"), ("500", "stalled-reader")],
)
def test_any_request_may_fail_once_while_every_log_line_is_lost(
    name: str, way: str, record_property: Note
) -> None:
    lost: collections.Counter[str] = collections.Counter()
    listen = functools.partial(lost_stderr.logging_lost, way, lost)
    play(record_property, name, OPERATOR, listen=listen)
    assert lost[way] > 0


def begin(failure: Failure) -> None:
    with api_node.staged(api_timeout_s=failure.api_timeout_s) as stage:
        for request in FOLLOWING:
            stage.stop_agent()
            stage.server.inject(failure.at(request))
            stage.start_agent()
            stage.reconfigure()
            assert stage.server.faults_waiting() == 0, request
            outcome(stage, failure.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_an_agent_whose_first_requests_fail_serves_its_node_all_the_same(name: str) -> None:
    begin(FAILURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_label_is_served_whatever_becomes_of_the_watch_and_of_the_list_after_it(
    name: str,
) -> None:
    with api_node.staged(api_timeout_s=FAILURES[name].api_timeout_s) as stage:
        for again in (api_node.Request(verb="watch", resource="nodes", nth=1), FOLLOWING[0]):
            expired = apiserver.Fault(token=api_node.TOKEN, verb="watch", status=410)
            stage.server.inject(expired)
            stage.server.inject(FAILURES[name].at(again))
            # The watch is renewed every second or so.
            stage.wait(lambda: stage.server.faults_waiting() == 0, "the faults")
            stage.reconfigure()
            outcome(stage, FAILURES[name].reason)


def test_a_label_is_served_after_a_watch_that_went_silent() -> None:
    with api_node.staged() as stage:
        stage.server.inject(apiserver.Fault(token=api_node.TOKEN, verb="watch", stall=True))
        stage.wait(lambda: stage.server.faults_waiting() == 0, "the fault")
        stage.reconfigure()
        assert stage.taken() == []
