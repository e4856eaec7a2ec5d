"""The agent's loop while nothing is requested, or the requested layout is active."""

import threading

import pytest

from mig_manager.agent import drift, intake, loop
from mig_manager.core import ports
from mig_manager.errors import Reason
from tests import waiting
from tests.pipeline.requests.scripted_loop import Pipeline, pauses, serve, serving


def test_a_driver_that_a_check_missed_is_checked_again_soon() -> None:
    rests_s: list[float | None] = []

    class Inbox(intake.Inbox):
        def wait_until_superseded(
            self, _generation: int, *, at_rest: bool = False, timeout_s: float | None = None
        ) -> bool:
            assert at_rest
            rests_s.append(timeout_s)
            return True

    for is_driver_away in (True, False):
        pipeline = Pipeline("a", Reason.APPLIED)
        pipeline.is_driver_away, pipeline.box = is_driver_away, Inbox()
        pipeline.box.put_label("a")
        loop.Agent(pipeline, pipeline.box, pauses(drift_check_s=300)).serve()

    assert [round(each or 0) for each in rests_s] == [15, 15, 300, 300]


def test_a_node_without_a_label_is_retried_until_its_gpus_are_published() -> None:
    pipeline = Pipeline(None, Reason.APPLIED)
    pipeline.restless = 3

    with serving(pipeline):
        assert pipeline.has_rested.wait(20)
        pipeline.box.stop()

    assert pipeline.restless == -1


@pytest.mark.parametrize("name", [None, "a"])
def test_unwritten_condition_is_retried_without_a_drift_check(name: str | None) -> None:
    pipeline = Pipeline(name, Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 3

    with serving(pipeline):
        assert pipeline.condition.is_written.wait(20)
        pipeline.box.stop()

    assert (pipeline.condition.refusals, pipeline.looks) == (0, 0)


def test_drift_check_runs_although_the_condition_is_unwritten() -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 1_000_000

    with serving(pipeline, pauses(0.01, drift_check_s=0.4)):
        waiting.until(lambda: pipeline.condition.refusals < 1_000_000)
        pipeline.next_action = drift.Action.RUN

    assert pipeline.looks > 0
    assert pipeline.runs == [("a", 1), ("a", 1)]


def test_new_request_is_served_although_the_condition_is_unwritten() -> None:
    pipeline = Pipeline("a", Reason.APPLIED, Reason.APPLIED)
    pipeline.condition.refusals = 1_000_000
    pipeline.on_run = lambda _request: threading.Timer(0.05, pipeline.box.put_label, ["b"]).start()

    serve(pipeline, pauses(600))

    assert pipeline.runs == [("a", 1), ("b", 1)]
    assert pipeline.condition.refusals == 1_000_000


def test_without_a_label_an_interrupted_run_is_undone() -> None:
    pipeline = Pipeline(None, Reason.APPLIED)

    with serving(pipeline, pauses(1)):
        assert pipeline.has_rested.wait(timeout=20)
        pipeline.box.put_label("a")

    assert pipeline.runs == [("a", 1)]
    assert pipeline.recovered == [""]


@pytest.mark.parametrize("action", [drift.Action.REST, drift.Action.RUN])
def test_without_a_label_a_gpu_event_leads_to_a_check_for_faults(action: drift.Action) -> None:
    pipeline = Pipeline(None, Reason.APPLIED)

    with serving(pipeline):
        assert pipeline.has_rested.wait(timeout=20)
        pipeline.has_rested.clear()
        pipeline.next_action = action
        pipeline.box.put_gpu_change()
        waiting.until(lambda: pipeline.looks == 1)
        # A change that another program has put back is ended as after the removal of the label.
        assert action is drift.Action.REST or pipeline.has_rested.wait(timeout=20)
        pipeline.box.put_label("a")

    assert pipeline.runs == [("a", 1)]


@pytest.mark.parametrize(
    ("ended", "action", "evicts"),
    [(Reason.APPLIED, drift.Action.HEAL, False), (Reason.DOES_NOT_FIT, drift.Action.RUN, True)],
    ids=["after a while", "after a GPU event"],
)
def test_drift_check_starts_a_run_that_evicts_only_after_a_failure(
    ended: Reason, action: drift.Action, *, evicts: bool
) -> None:
    pipeline = Pipeline("a", ended, Reason.APPLIED)
    pipeline.next_action = action
    if evicts:
        pipeline.on_run = lambda _request: pipeline.box.put_gpu_change()

    serve(pipeline, pauses(drift_check_s=0.0 if evicts else 0.02))

    assert pipeline.looks == 1
    assert pipeline.runs == [("a", 1), ("a", 1)]
    assert pipeline.evicting == [True, evicts]


def test_change_of_use_is_observed_in_any_pause_on_demand() -> None:
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    looks: list[bool] = []

    def note_change(_request: ports.Cancellation) -> None:
        # Noted during a run, and observed in the pause before the retry.
        pipeline.box.put_use_change()
        looks.append(pipeline.reported.has_observed.is_set())

    pipeline.on_run = note_change
    pipeline.box.put_on_demand(is_on_demand=True)

    serve(pipeline)

    assert pipeline.runs == [("a", 1), ("a", 2)]
    assert looks == [False, True]


def test_the_on_demand_label_is_followed_at_rest_as_it_comes_and_goes() -> None:
    pipeline = Pipeline(None)

    with serving(pipeline):
        assert pipeline.has_rested.wait(20)
        pipeline.box.put_use_change()
        pipeline.box.put_on_demand(is_on_demand=True)
        assert pipeline.reported.has_observed.wait(20)
        pipeline.box.put_on_demand(is_on_demand=False)
        waiting.until(lambda: not pipeline.reported.is_followed)
        pipeline.reported.has_observed.clear()
        changes = pipeline.reported.changes
        pipeline.box.put_use_change()
        waiting.until(lambda: pipeline.reported.changes > changes)
        pipeline.box.stop()

    assert not pipeline.reported.has_observed.is_set()
