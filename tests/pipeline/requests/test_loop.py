"""The agent's loop while a layout is requested; tests/process runs the whole process."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.agent import intake
from mig_manager.core import liveness, ports
from mig_manager.reasons import Reason
from tests.pipeline.requests import scripted_loop
from tests.pipeline.requests.scripted_loop import Pipeline, pauses, serve
from tests.rigs.node import fakes, inboxes

LOST = errors.ClusterError("down", reason=Reason.API_UNAVAILABLE)

LOCKED = errors.LockedError("another manager is at work: apply")


@pytest.mark.parametrize(
    ("script", "recoveries", "attempts", "recovered"),
    [
        ((Reason.IN_USE, Reason.DRIVER_NOT_LOADED, Reason.APPLIED), [], [1, 2, 3], 1),
        ((LOST, Reason.APPLIED), [], [1, 2], 2),
        ((Reason.APPLIED,), [LOCKED], [2], 2),
    ],
    ids=["transient failures", "a silent API", "a locked recovery"],
)
def test_a_request_is_retried_until_it_succeeds(
    script: tuple[Reason | Exception, ...],
    recoveries: list[Exception],
    attempts: list[int],
    recovered: int,
) -> None:
    pipeline = Pipeline("a", *script)
    pipeline.recoveries = list(recoveries)

    serve(pipeline)

    assert pipeline.runs == [("a", attempt) for attempt in attempts]
    assert pipeline.recovered_layouts == ["a"] * recovered
    assert all(0 < delay <= 0.02 for delay in pipeline.delays_s)


def test_a_driver_that_is_loading_is_not_waited_for_with_long_pauses() -> None:
    telemetry = fakes.FakeTelemetry()

    for reason in (Reason.DRIVER_NOT_LOADED, Reason.IN_USE):
        serve(Pipeline("a", reason), pauses(600), telemetry=telemetry)

    (first_s,), (second_s,) = telemetry.events["retry_scheduled"]
    assert first_s == 15
    assert second_s >= 600


def test_an_agent_that_stops_between_two_attempts_reopens_the_node() -> None:
    pipeline = Pipeline("a", Reason.DRAIN_TIMEOUT)

    serve(pipeline, pauses(600))

    assert pipeline.stops == 1


def test_early_change_of_the_config_file_does_not_remove_the_request() -> None:
    pipeline = Pipeline("a", Reason.APPLIED)
    pipeline.inbox = inboxes.Inbox(pipeline.clock, pipeline.pause)
    pipeline.inbox.put_file_change()
    pipeline.news = [
        lambda: pipeline.clock.wait(10),
        lambda: pipeline.inbox.put_label("a"),
    ]

    serve(pipeline, pauses(drift_check_s=1))

    assert pipeline.rests == 0
    assert pipeline.recovered_layouts == ["a"]
    assert pipeline.runs == [("a", 1)]


def test_checks_of_the_request_are_signs_of_life() -> None:
    now_s = 0.0
    silences_s: list[float] = []
    pulse = liveness.Pulse(lambda: now_s)
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    pipeline.inbox = inboxes.Inbox(pipeline.clock, pipeline.pause, report=pulse.beat)
    pipeline.inbox.put_label("a")

    def work(request: ports.Cancellation) -> None:
        nonlocal now_s
        assert pipeline.is_current
        for wait in (request.check, lambda: request.wait(0.001), lambda: request.pause(0.001)):
            now_s += 20
            silences_s.append(pulse.silence_s)
            wait()
            silences_s.append(pulse.silence_s)
        now_s += 5

    pipeline.on_run = work
    agent = scripted_loop.agent(pipeline, pulse=pulse)
    assert not pipeline.is_current

    agent.serve()

    assert silences_s == [20, 0] * 6
    assert pulse.silence_s == 0


@pytest.mark.parametrize("reason", [Reason.DOES_NOT_FIT, Reason.IN_USE], ids=["final", "retry"])
def test_newer_request_ends_the_pause_after_a_failure(reason: Reason) -> None:
    pipeline = Pipeline("a", reason, Reason.APPLIED)
    pipeline.news = [lambda: pipeline.inbox.put_label("b")]

    serve(pipeline, pauses(600))

    assert pipeline.runs == [("a", 1), ("b", 1)]
    assert len(pipeline.pauses_s) == 1


def on_node(node_uid: str, name: str = "a") -> Callable[[intake.Inbox], None]:
    return lambda inbox: inbox.put_label(name, node_uid=node_uid)


@pytest.mark.parametrize(
    ("reasons", "then", "forgotten", "is_new"),
    [
        ((Reason.APPLIED,), [on_node("u2")], 1, False),
        ((Reason.APPLIED,), [on_node("u2"), on_node("u2", "b")], 1, True),
        ((Reason.APPLIED,), [on_node("u2"), intake.Inbox.put_file_change], 1, False),
        ((Reason.APPLIED,), [intake.Inbox.put_file_change], 0, False),
        ((Reason.DOES_NOT_FIT,), [on_node("u2")], 1, False),
        ((Reason.IN_USE, Reason.APPLIED), [on_node("u2")], 1, False),
        ((Reason.APPLIED,), [on_node("u1", "b"), on_node("u1")], 0, True),
    ],
    ids=["same", "another label", "another file", "same node", "failed", "retried", "set again"],
)
def test_only_another_label_is_a_new_request_and_no_new_node_or_file(
    reasons: tuple[Reason, ...],
    then: list[Callable[[intake.Inbox], None]],
    forgotten: int,
    *,
    is_new: bool,
) -> None:
    pipeline = Pipeline("a", *reasons, Reason.APPLIED, node_uid="u1")

    def register(_request: ports.Cancellation) -> None:
        # At the end of the last run before: what comes while it runs is served after it.
        if len(pipeline.runs) == len(reasons):
            for act in then:
                act(pipeline.inbox)

    pipeline.on_run = register

    serve(pipeline)

    assert len(pipeline.runs) == len(reasons) + 1
    assert (pipeline.forgotten, pipeline.are_new[-1]) == (forgotten, is_new)
    assert len(pipeline.recovered_layouts) == 1 + forgotten


def test_second_new_node_in_a_row_makes_no_new_request_either() -> None:
    lost = errors.ClusterError("the Node is gone", reason=Reason.API_ERROR)
    pipeline = Pipeline("a", Reason.APPLIED, lost, Reason.APPLIED, node_uid="u1")
    uids = ["u3", "u2"]

    def register(_request: ports.Cancellation) -> None:
        if uids:
            pipeline.inbox.put_label("a", node_uid=uids.pop())

    pipeline.on_run = register

    serve(pipeline, pauses(600))

    assert pipeline.are_new == [False, False, False]
    assert pipeline.forgotten == 2


def test_run_is_alone_with_the_driver_and_a_pause_is_not() -> None:
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    calls: list[str] = []
    pipeline.on_run = lambda _request: calls.append("run")

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        calls.append("alone")
        yield
        calls.append("not alone")

    serve(pipeline, suspend_gpu_events=alone)

    assert calls == ["alone", "run", "not alone"] * 2
