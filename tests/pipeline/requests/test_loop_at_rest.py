"""The agent's loop while nothing is requested, or the requested layout is active."""

import math

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core import model, ports
from mig_manager.reasons import Reason
from tests.pipeline.requests.scripted_loop import ScriptedReconciler, pauses, serve
from tests.rigs.node import gpu_values


@pytest.mark.parametrize(("is_driver_away", "pause_s"), [(True, 15), (False, 300)])
def test_a_driver_that_a_check_missed_is_checked_again_soon(
    *, is_driver_away: bool, pause_s: float
) -> None:
    reconciler = ScriptedReconciler("a", Reason.APPLIED, Reason.APPLIED)
    reconciler.is_driver_away, reconciler.next_action = is_driver_away, actions.Action.RUN

    serve(reconciler, pauses(drift_check_s=300))

    assert reconciler.pauses_s == [pause_s]


def test_an_unreachable_gpu_is_checked_as_often_as_retries() -> None:
    reconciler = ScriptedReconciler("a", Reason.APPLIED, Reason.APPLIED)
    (lost,) = gpu_values.gpus_of("1xA30")
    reconciler.verified_gpus = model.ObservedGpus((), [gpu_values.unreachable(lost)])
    reconciler.next_action = actions.Action.RUN

    serve(reconciler, pauses(30, drift_check_s=300))

    assert reconciler.pauses_s == [60]


def test_a_node_without_a_label_is_retried_until_its_gpus_are_published() -> None:
    reconciler = ScriptedReconciler(None)
    reconciler.restore_retries = 3

    serve(reconciler)

    assert (reconciler.restore_retries, reconciler.finished_restores) == (-1, 1)


@pytest.mark.parametrize("name", [None, "a"])
def test_unwritten_condition_is_retried_with_backoff_and_no_drift_check(name: str | None) -> None:
    reconciler = ScriptedReconciler(name, Reason.APPLIED, Reason.APPLIED)
    reconciler.condition.refusals = 3

    serve(reconciler, pauses(10))

    assert reconciler.pauses_s == [10, 20, 20, math.inf]
    assert (reconciler.condition.refusals, reconciler.drift_checks) == (0, 0)


def test_drift_check_runs_although_the_condition_is_unwritten() -> None:
    reconciler = ScriptedReconciler("a", Reason.APPLIED, Reason.APPLIED)
    reconciler.condition.refusals = 1_000_000
    reconciler.next_action = actions.Action.RUN

    serve(reconciler, pauses(1, drift_check_s=40))

    assert reconciler.condition.refusals < 1_000_000
    assert reconciler.drift_checks == 1
    assert reconciler.runs == [("a", 1), ("a", 1)]


def test_new_request_is_served_although_the_condition_is_unwritten() -> None:
    reconciler = ScriptedReconciler("a", Reason.APPLIED, Reason.APPLIED)
    reconciler.condition.refusals = 1_000_000
    reconciler.news = [lambda: reconciler.inbox.put_label("b")]

    serve(reconciler, pauses(600))

    assert reconciler.runs == [("a", 1), ("b", 1)]
    assert reconciler.condition.refusals == 1_000_000


def test_without_a_label_an_interrupted_run_is_undone() -> None:
    reconciler = ScriptedReconciler(None, Reason.APPLIED)
    reconciler.news = [lambda: reconciler.inbox.put_label("a")]

    serve(reconciler)

    assert reconciler.runs == [("a", 1)]
    assert reconciler.recovered_layouts == [""]


@pytest.mark.parametrize("action", [actions.Action.REST, actions.Action.RUN])
def test_without_a_label_a_gpu_event_leads_to_a_check_for_faults(action: actions.Action) -> None:
    reconciler = ScriptedReconciler(None, Reason.APPLIED)
    reconciler.next_action = action
    reconciler.news = [reconciler.inbox.put_gpu_change, lambda: reconciler.inbox.put_label("a")]

    serve(reconciler)

    assert reconciler.drift_checks == 1
    # A change that another program has put back is ended as after the removal of the label.
    assert reconciler.finished_restores == 1 + (action is actions.Action.RUN)
    assert reconciler.runs == [("a", 1)]


@pytest.mark.parametrize(
    ("reason", "action", "evicts"),
    [
        (Reason.APPLIED, actions.Action.HEAL, False),
        (Reason.DOES_NOT_FIT, actions.Action.RUN, True),
    ],
    ids=["after a while", "after a GPU event"],
)
def test_drift_check_starts_a_run_that_evicts_only_after_a_failure(
    reason: Reason, action: actions.Action, *, evicts: bool
) -> None:
    reconciler = ScriptedReconciler("a", reason, Reason.APPLIED)
    reconciler.next_action = action
    if evicts:
        reconciler.on_run = lambda _cancel: reconciler.inbox.put_gpu_change()

    serve(reconciler, pauses(drift_check_s=0.0 if evicts else 0.02))

    assert reconciler.drift_checks == 1
    assert reconciler.runs == [("a", 1), ("a", 1)]
    assert reconciler.are_heals == [False, not evicts]


def test_change_of_use_is_observed_in_any_pause_on_demand() -> None:
    reconciler = ScriptedReconciler("a", Reason.IN_USE, Reason.APPLIED)
    was_observed: list[bool] = []

    def note_change(_cancel: ports.Cancellation) -> None:
        # Noted during a run, and observed in the pause before the retry.
        reconciler.inbox.put_use_change()
        was_observed.append(reconciler.reported_capacity.observations > 0)

    reconciler.on_run = note_change
    reconciler.inbox.put_on_demand(is_on_demand=True)

    serve(reconciler)

    assert reconciler.runs == [("a", 1), ("a", 2)]
    assert was_observed == [False, True]


def test_the_on_demand_label_is_followed_at_rest_as_it_comes_and_goes() -> None:
    reconciler = ScriptedReconciler(None)
    reconciler.news = [
        lambda: reconciler.inbox.put_on_demand(is_on_demand=True),
        reconciler.inbox.put_use_change,
        lambda: reconciler.inbox.put_on_demand(is_on_demand=False),
        reconciler.inbox.put_use_change,
    ]

    serve(reconciler)

    assert reconciler.reported_capacity.changes == 4
    assert reconciler.reported_capacity.observations == 2
