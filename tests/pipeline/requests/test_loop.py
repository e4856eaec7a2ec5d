"""The agent's loop while a layout is requested; tests/process runs the whole process."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.agent import intake
from mig_manager.core import liveness, ports
from mig_manager.reasons import Reason
from tests.pipeline.requests import scripted_loop
from tests.pipeline.requests.scripted_loop import ScriptedReconciler, pauses, serve
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
    reconciler = ScriptedReconciler("a", *script)
    reconciler.recoveries = list(recoveries)

    serve(reconciler)

    assert reconciler.runs == [("a", attempt) for attempt in attempts]
    assert reconciler.recovered_layouts == ["a"] * recovered
    assert all(0 < delay <= 0.02 for delay in reconciler.delays_s)


def test_a_driver_that_is_loading_is_not_waited_for_with_long_pauses() -> None:
    telemetry = fakes.FakeTelemetry()

    for reason in (Reason.DRIVER_NOT_LOADED, Reason.IN_USE):
        serve(ScriptedReconciler("a", reason), pauses(600), telemetry=telemetry)

    (first_s,), (second_s,) = telemetry.events["retry_scheduled"]
    assert first_s == 15
    assert second_s >= 600


def test_an_agent_that_stops_between_two_attempts_reopens_the_node() -> None:
    reconciler = ScriptedReconciler("a", Reason.DRAIN_TIMEOUT)

    serve(reconciler, pauses(600))

    assert reconciler.stops == 1


def test_early_change_of_the_config_file_does_not_remove_the_request() -> None:
    reconciler = ScriptedReconciler("a", Reason.APPLIED)
    reconciler.inbox = inboxes.Inbox(reconciler.clock, reconciler.pause)
    reconciler.inbox.put_file_change()
    reconciler.news = [
        lambda: reconciler.clock.wait(10),
        lambda: reconciler.inbox.put_label("a"),
    ]

    serve(reconciler, pauses(drift_check_s=1))

    assert reconciler.finished_restores == 0
    assert reconciler.recovered_layouts == ["a"]
    assert reconciler.runs == [("a", 1)]


def test_checks_of_the_request_are_signs_of_life() -> None:
    now_s = 0.0
    silences_s: list[float] = []
    pulse = liveness.Pulse(lambda: now_s)
    reconciler = ScriptedReconciler("a", Reason.IN_USE, Reason.APPLIED)
    reconciler.inbox = inboxes.Inbox(reconciler.clock, reconciler.pause, report=pulse.beat)
    reconciler.inbox.put_label("a")

    def work(cancel: ports.Cancellation) -> None:
        nonlocal now_s
        assert reconciler.is_current
        for wait in (cancel.check, lambda: cancel.wait(0.001), lambda: cancel.pause(0.001)):
            now_s += 20
            silences_s.append(pulse.silence_s)
            wait()
            silences_s.append(pulse.silence_s)
        now_s += 5

    reconciler.on_run = work
    agent = scripted_loop.agent(reconciler, pulse=pulse)
    assert not reconciler.is_current

    agent.serve()

    assert silences_s == [20, 0] * 6
    assert pulse.silence_s == 0


@pytest.mark.parametrize("reason", [Reason.DOES_NOT_FIT, Reason.IN_USE], ids=["final", "retry"])
def test_newer_request_ends_the_pause_after_a_failure(reason: Reason) -> None:
    reconciler = ScriptedReconciler("a", reason, Reason.APPLIED)
    reconciler.news = [lambda: reconciler.inbox.put_label("b")]

    serve(reconciler, pauses(600))

    assert reconciler.runs == [("a", 1), ("b", 1)]
    assert len(reconciler.pauses_s) == 1


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
    reconciler = ScriptedReconciler("a", *reasons, Reason.APPLIED, node_uid="u1")

    def register(_cancel: ports.Cancellation) -> None:
        # At the end of the last run before: what comes while it runs is served after it.
        if len(reconciler.runs) == len(reasons):
            for act in then:
                act(reconciler.inbox)

    reconciler.on_run = register

    serve(reconciler)

    assert len(reconciler.runs) == len(reasons) + 1
    assert (reconciler.forgotten, reconciler.are_new[-1]) == (forgotten, is_new)
    assert len(reconciler.recovered_layouts) == 1 + forgotten


def test_second_new_node_in_a_row_makes_no_new_request_either() -> None:
    lost = errors.ClusterError("the Node is gone", reason=Reason.API_ERROR)
    reconciler = ScriptedReconciler("a", Reason.APPLIED, lost, Reason.APPLIED, node_uid="u1")
    uids = ["u3", "u2"]

    def register(_cancel: ports.Cancellation) -> None:
        if uids:
            reconciler.inbox.put_label("a", node_uid=uids.pop())

    reconciler.on_run = register

    serve(reconciler, pauses(600))

    assert reconciler.are_new == [False, False, False]
    assert reconciler.forgotten == 2


def test_run_is_alone_with_the_driver_and_a_pause_is_not() -> None:
    reconciler = ScriptedReconciler("a", Reason.IN_USE, Reason.APPLIED)
    calls: list[str] = []
    reconciler.on_run = lambda _cancel: calls.append("run")

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        calls.append("alone")
        yield
        calls.append("not alone")

    serve(reconciler, suspend_gpu_events=alone)

    assert calls == ["alone", "run", "not alone"] * 2
