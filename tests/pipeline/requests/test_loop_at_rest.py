"""The agent's loop while nothing is requested, or the requested layout is active."""

import math

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core import model, ports
from mig_manager.reasons import Reason
from tests.pipeline.requests.scripted_loop import Pipeline, pauses, serve
from tests.rigs.node import gpu_values


@pytest.mark.parametrize(("is_driver_away", "pause_s"), [(True, 15), (False, 300)])
def test_a_driver_that_a_check_missed_is_checked_again_soon(
    *, is_driver_away: bool, pause_s: float
) -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    pipeline.is_driver_away, pipeline.next_action = is_driver_away, actions.Action.RUN

    serve(pipeline, pauses(drift_check_s=300))

    assert pipeline.pauses_s == [pause_s]


def test_an_unreachable_gpu_is_checked_as_often_as_retries() -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    (lost,) = gpu_values.gpus_of("1xA30")
    pipeline.verified_gpus = model.ObservedGpus((), [gpu_values.unreachable(lost)])
    pipeline.next_action = actions.Action.RUN

    serve(pipeline, pauses(30, drift_check_s=300))

    assert pipeline.pauses_s == [60]


def test_a_node_without_a_label_is_retried_until_its_gpus_are_published() -> None:
    pipeline = Pipeline(None)
    pipeline.restless = 3

    serve(pipeline)

    assert (pipeline.restless, pipeline.rests) == (-1, 1)


@pytest.mark.parametrize("name", [None, "a"])
def test_unwritten_condition_is_retried_with_backoff_and_no_drift_check(name: str | None) -> None:
    pipeline = Pipeline(name, Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 3

    serve(pipeline, pauses(10))

    assert pipeline.pauses_s == [10, 20, 20, math.inf]
    assert (pipeline.condition.refusals, pipeline.looks) == (0, 0)


def test_drift_check_runs_although_the_condition_is_unwritten() -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 1_000_000
    pipeline.next_action = actions.Action.RUN

    serve(pipeline, pauses(1, drift_check_s=40))

    assert pipeline.condition.refusals < 1_000_000
    assert pipeline.looks == 1
    assert pipeline.runs == [("a", 1), ("a", 1)]


def test_new_request_is_served_although_the_condition_is_unwritten() -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 1_000_000
    pipeline.news = [lambda: pipeline.inbox.put_label("b")]

    serve(pipeline, pauses(600))

    assert pipeline.runs == [("a", 1), ("b", 1)]
    assert pipeline.condition.refusals == 1_000_000


def test_without_a_label_an_interrupted_run_is_undone() -> None:
    pipeline = Pipeline(None, Reason.APPLIED)
    pipeline.news = [lambda: pipeline.inbox.put_label("a")]

    serve(pipeline)

    assert pipeline.runs == [("a", 1)]
    assert pipeline.recovered_layouts == [""]


@pytest.mark.parametrize("action", [actions.Action.REST, actions.Action.RUN])
def test_without_a_label_a_gpu_event_leads_to_a_check_for_faults(action: actions.Action) -> None:
    pipeline = Pipeline(None, Reason.APPLIED)
    pipeline.next_action = action
    pipeline.news = [pipeline.inbox.put_gpu_change, lambda: pipeline.inbox.put_label("a")]

    serve(pipeline)

    assert pipeline.looks == 1
    # A change that another program has put back is ended as after the removal of the label.
    assert pipeline.rests == 1 + (action is actions.Action.RUN)
    assert pipeline.runs == [("a", 1)]


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
    pipeline = Pipeline("a", reason, Reason.APPLIED)
    pipeline.next_action = action
    if evicts:
        pipeline.on_run = lambda _request: pipeline.inbox.put_gpu_change()

    serve(pipeline, pauses(drift_check_s=0.0 if evicts else 0.02))

    assert pipeline.looks == 1
    assert pipeline.runs == [("a", 1), ("a", 1)]
    assert pipeline.are_heals == [False, not evicts]


def test_change_of_use_is_observed_in_any_pause_on_demand() -> None:
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    looks: list[bool] = []

    def note_change(_request: ports.Cancellation) -> None:
        # Noted during a run, and observed in the pause before the retry.
        pipeline.inbox.put_use_change()
        looks.append(pipeline.reported_capacity.observations > 0)

    pipeline.on_run = note_change
    pipeline.inbox.put_on_demand(is_on_demand=True)

    serve(pipeline)

    assert pipeline.runs == [("a", 1), ("a", 2)]
    assert looks == [False, True]


def test_the_on_demand_label_is_followed_at_rest_as_it_comes_and_goes() -> None:
    pipeline = Pipeline(None)
    pipeline.news = [
        lambda: pipeline.inbox.put_on_demand(is_on_demand=True),
        pipeline.inbox.put_use_change,
        lambda: pipeline.inbox.put_on_demand(is_on_demand=False),
        pipeline.inbox.put_use_change,
    ]

    serve(pipeline)

    assert pipeline.reported_capacity.changes == 4
    assert pipeline.reported_capacity.observations == 2
