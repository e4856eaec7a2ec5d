"""The agent's loop over a pipeline in memory; tests/process runs the whole process."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.agent import drift, intake, jobs, loop, outcomes, reconcile, settings
from mig_manager.agent.reports import capacity
from mig_manager.core import liveness, model, ports
from mig_manager.core.layout import custom_layouts
from mig_manager.errors import Reason
from tests import waiting
from tests.node import fake_cluster, fakes


class Capacity(capacity.CapacityReport):
    """Observes after each change of use on a node with on-demand partitioning."""

    def __init__(self) -> None:
        self.is_followed = False
        self.changes = 0
        self.is_pending = False
        self.has_observed = threading.Event()

    def follow(self, *, is_on_demand: bool, has_changed: bool) -> None:
        self.is_followed = is_on_demand
        self.changes += has_changed
        self.is_pending |= is_on_demand and has_changed

    @property
    def next_in_s(self) -> float:
        return 0.0 if self.is_pending else math.inf

    def refresh(self) -> None:
        self.is_pending = False
        self.has_observed.set()


class Condition(fake_cluster.FakeNode):
    """A Node whose condition cannot be written at first."""

    def __init__(self) -> None:
        self.refusals = 0
        """How many attempts to write the condition still fail."""
        self.is_written = threading.Event()

    @property
    def has_unwritten_condition(self) -> bool:
        return self.refusals > 0

    def retry_condition(self) -> None:
        self.refusals -= 1
        if not self.refusals:
            self.is_written.set()


class Pipeline(reconcile.Reconciler):
    """Answers each run from a script; stops the agent after the last answer."""

    def __init__(self, label: str | None, *script: Reason | Exception, node_uid: str = "") -> None:
        self.box = intake.Inbox()
        self.box.put_label(label, node_uid=node_uid)
        self._script = list(script)
        self.runs: list[tuple[str, int]] = []
        self.delays_s: list[float] = []
        self.evicting: list[bool] = []
        self.news: list[bool] = []
        self.looks = 0
        self.is_driver_away = False
        self.next_action = drift.Action.REST
        self.recovered: list[str] = []
        self.recoveries: list[Exception] = []
        """What ``recover`` raises, call by call; afterwards it succeeds."""
        self.stopped = 0
        self.has_rested = threading.Event()
        self.restless = 0
        """How many times ``rest`` asks to be called again."""
        self.forgotten = 0
        self.on_run: Callable[[ports.Cancellation], object] = lambda _request: None
        self.capacity = self.reported = Capacity()
        self.node = self.condition = Condition()

    def recover(self, request: jobs.LayoutRequest) -> None:
        self.recovered.append(request.config)
        if self.recoveries:
            raise self.recoveries.pop(0)

    def stop(self) -> None:
        self.stopped += 1

    def rest(self) -> bool:
        self.restless -= 1
        if self.restless < 0:
            self.has_rested.set()
        return self.restless >= 0

    @property
    def awaits_driver(self) -> bool:
        return self.is_driver_away

    def check_without_request(self) -> drift.Action:
        self.looks += 1
        action, self.next_action = self.next_action, drift.Action.REST
        return action

    def forget_node(self) -> None:
        self.forgotten += 1

    def check_drift(self, request: jobs.LayoutRequest, outcome: outcomes.Outcome) -> drift.Action:
        assert request.config == self.runs[-1][0]
        assert not outcome.should_retry
        self.looks += 1
        action, self.next_action = self.next_action, drift.Action.REST
        return action

    def run(self, request: jobs.LayoutRequest, cancel: ports.Cancellation) -> outcomes.Outcome:
        self.runs.append((request.config, request.attempt))
        self.delays_s.append(request.retry_after_s)
        self.evicting.append(request.may_evict)
        self.news.append(request.is_new)
        self.on_run(cancel)
        answer = self._script.pop(0)
        if not self._script:
            self.box.stop()
        if isinstance(answer, Exception):
            raise answer
        is_good = answer is Reason.APPLIED
        state = model.State.SUCCESS if is_good else model.State.FAILED
        return outcomes.Outcome(
            state=state, reason=answer, description="", should_retry=answer.is_transient
        )


def pauses(retry_s: float = 0.01, drift_check_s: float = 0.0) -> settings.Limits:
    return settings.Limits(
        retry_initial_s=retry_s, retry_max_s=2 * retry_s, drift_check_interval_s=drift_check_s
    )


@contextlib.contextmanager
def serving(pipeline: Pipeline, limits: settings.Limits | None = None) -> Iterator[None]:
    """Run the loop beside the body, until it ends by itself."""
    served = loop.Agent(pipeline, pipeline.box, limits or pauses())
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    yield
    thread.join(timeout=20)
    assert not thread.is_alive()


def serve(pipeline: Pipeline, limits: settings.Limits | None = None) -> None:
    with serving(pipeline, limits):
        pass


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
def test_a_request_is_tried_again_until_all_is_done_after(
    script: tuple[Reason | Exception, ...],
    recoveries: list[Exception],
    attempts: list[int],
    recovered: int,
) -> None:
    pipeline = Pipeline("a", *script)
    pipeline.recoveries = list(recoveries)

    serve(pipeline)

    assert pipeline.runs == [("a", attempt) for attempt in attempts]
    assert pipeline.recovered == ["a"] * recovered
    assert all(0 < delay <= 0.02 for delay in pipeline.delays_s)


def test_a_driver_that_is_loading_is_not_waited_for_with_long_pauses() -> None:
    telemetry = fakes.FakeTelemetry()

    for reason in (Reason.DRIVER_NOT_LOADED, Reason.IN_USE):
        pipeline = Pipeline("a", reason)
        loop.Agent(pipeline, pipeline.box, pauses(600), telemetry=telemetry).serve()

    (first_s,), (second_s,) = telemetry.events["retry_scheduled"]
    assert first_s == 15
    assert second_s >= 600


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


def test_an_agent_that_stops_between_two_attempts_reopens_the_node() -> None:
    pipeline = Pipeline("a", Reason.DRAIN_TIMEOUT)

    serve(pipeline, pauses(600))

    assert pipeline.stopped == 1


def test_early_change_of_the_config_file_is_no_removed_label() -> None:
    pipeline = Pipeline("a", Reason.APPLIED)
    pipeline.box = intake.Inbox()
    pipeline.box.put_file_change()

    with serving(pipeline, pauses(drift_check_s=0.01)):
        assert not pipeline.has_rested.wait(0.1)
        pipeline.box.put_label("a")

    assert pipeline.recovered == ["a"]
    assert pipeline.runs == [("a", 1)]


def test_checks_of_the_request_are_signs_of_life() -> None:
    now_s = 0.0
    silences_s: list[float] = []
    pulse = liveness.Pulse(lambda: now_s)
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    pipeline.box = intake.Inbox(pulse.beat)
    pipeline.box.put_label("a")

    def work(request: ports.Cancellation) -> None:
        nonlocal now_s
        assert agent.is_recovered
        for wait in (request.check, lambda: request.wait(0.001), lambda: request.pause(0.001)):
            now_s += 20
            silences_s.append(pulse.silence_s)
            wait()
            silences_s.append(pulse.silence_s)
        now_s += 5

    pipeline.on_run = work
    agent = loop.Agent(pipeline, pipeline.box, pauses(), pulse=pulse)
    assert not agent.is_recovered

    agent.serve()

    assert silences_s == [20, 0] * 6
    assert pulse.silence_s == 0


@pytest.mark.parametrize(
    ("reason", "delay_s"),
    [(Reason.DOES_NOT_FIT, 0.0), (Reason.IN_USE, 0.05)],
    ids=["final", "retry"],
)
def test_newer_request_ends_the_pause_after_a_failure(reason: Reason, delay_s: float) -> None:
    pipeline = Pipeline("a", reason, Reason.APPLIED)
    pipeline.on_run = lambda _request: threading.Timer(
        delay_s, pipeline.box.put_label, ["b"]
    ).start()

    serve(pipeline, pauses(600))

    assert pipeline.runs == [("a", 1), ("b", 1)]


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


def on_node(node_uid: str, name: str = "a") -> Callable[[intake.Inbox], None]:
    return lambda box: box.put_label(name, node_uid=node_uid)


@pytest.mark.parametrize(
    ("ended", "then", "forgotten", "is_new"),
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
    ended: tuple[Reason, ...],
    then: list[Callable[[intake.Inbox], None]],
    forgotten: int,
    *,
    is_new: bool,
) -> None:
    pipeline = Pipeline("a", *ended, Reason.APPLIED, node_uid="u1")

    def register(_request: ports.Cancellation) -> None:
        # At the end of the last run before: what comes while it runs is served after it.
        if len(pipeline.runs) == len(ended):
            for act in then:
                act(pipeline.box)

    pipeline.on_run = register

    serve(pipeline)

    assert len(pipeline.runs) == len(ended) + 1
    assert (pipeline.forgotten, pipeline.news[-1]) == (forgotten, is_new)
    assert len(pipeline.recovered) == 1 + forgotten


def test_the_second_new_node_in_a_row_is_no_new_request_either() -> None:
    lost = errors.ClusterError("the Node is gone", reason=Reason.API_ERROR)
    pipeline = Pipeline("a", Reason.APPLIED, lost, Reason.APPLIED, node_uid="u1")
    uids = ["u3", "u2"]

    def register(_request: ports.Cancellation) -> None:
        if uids:
            pipeline.box.put_label("a", node_uid=uids.pop())

    pipeline.on_run = register

    serve(pipeline, pauses(600))

    assert pipeline.news == [False, False, False]
    assert pipeline.forgotten == 2


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


def test_run_is_alone_with_the_driver_and_a_pause_is_not() -> None:
    pipeline = Pipeline("a", Reason.IN_USE, Reason.APPLIED)
    calls: list[str] = []
    pipeline.on_run = lambda _request: calls.append("run")

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        calls.append("alone")
        yield
        calls.append("not alone")

    loop.Agent(pipeline, pipeline.box, pauses(), suspend_gpu_events=alone).serve()

    assert calls == ["alone", "run", "not alone"] * 2


def test_end_of_the_opt_in_is_no_new_request() -> None:
    own = custom_layouts.Custom(node_name="n", text="x", is_on_demand=True)
    box = intake.Inbox()
    box.put_label("custom", custom=own)
    request = box.next(0)
    assert request

    box.put_label("custom", custom=dataclasses.replace(own, is_on_demand=False))
    request.check()
    box.put_label("custom", custom=dataclasses.replace(own, text="y", is_on_demand=False))

    following = box.next(request.generation)
    assert following
    assert following.layout.custom == custom_layouts.Custom(
        node_name="n", text="y", is_on_demand=False
    )


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
