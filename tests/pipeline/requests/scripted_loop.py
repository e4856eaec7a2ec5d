"""The agent's loop over a reconciler that answers from a script."""

import math
from collections.abc import Callable
from typing import Any

from mig_manager.agent import agent_settings, layout_request, loop, outcomes, reconcile
from mig_manager.agent.drift import actions
from mig_manager.agent.reports import capacity_report
from mig_manager.core import model, ports
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.rigs.node import fake_cluster, fakes, inboxes

_MAX_PAUSES = 1000


class Capacity(capacity_report.CapacityReport):
    """Observes after each change of use on a node with on-demand partitioning."""

    def __init__(self) -> None:
        self.is_followed = False
        self.changes = 0
        self.is_pending = False
        self.observations = 0

    def follow(self, *, is_on_demand: bool, has_changed: bool) -> None:
        self.is_followed = is_on_demand
        self.changes += has_changed
        self.is_pending |= is_on_demand and has_changed

    @property
    def next_in_s(self) -> float:
        return 0.0 if self.is_pending else math.inf

    def refresh(self) -> None:
        self.is_pending = False
        self.observations += 1


class Condition(fake_cluster.FakeNode):
    """A Node whose condition cannot be written at first."""

    def __init__(self) -> None:
        self.refusals = 0
        """How many attempts to write the condition still fail."""

    @property
    def has_unwritten_condition(self) -> bool:
        return self.refusals > 0

    def retry_condition(self) -> None:
        self.refusals -= 1


class ScriptedReconciler(reconcile.Reconciler):
    """Answers each run from a script; stops the agent after the last answer.

    Also stops it in a pause that nothing would end.
    """

    def __init__(self, label: str | None, *script: Reason | Exception, node_uid: str = "") -> None:
        self.clock = fakes.FakeClock()
        self.inbox = inboxes.Inbox(self.clock, self.pause)
        self.inbox.put_label(label, node_uid=node_uid)
        self.pauses_s: list[float] = []
        self.news: list[Callable[[], object]] = []
        """What happens at the beginning of the next pauses, one each."""
        self._script = list(script)
        self.runs: list[tuple[str, int]] = []
        self.delays_s: list[float] = []
        self.are_heals: list[bool] = []
        self.are_new: list[bool] = []
        self.drift_checks = 0
        self.is_driver_away = False
        self.verified_gpus = model.NO_GPUS  # of every outcome
        self.next_action = actions.Action.REST
        self.recovered_layouts: list[str] = []
        self.recoveries: list[Exception] = []
        """What ``recover`` raises, call by call; afterwards it succeeds."""
        self.has_recovered = False
        self.stops = 0
        self.finished_restores = 0
        self.restore_retries = 0
        """How many times ``restore_without_request`` asks to be called again."""
        self.forgotten = 0
        self.on_run: Callable[[ports.Cancellation], object] = lambda _cancel: None
        self.capacity = self.reported_capacity = Capacity()
        self.node = self.condition = Condition()

    def pause(self, pause: inboxes.Pause) -> None:
        self.pauses_s.append(pause.seconds)
        assert len(self.pauses_s) < _MAX_PAUSES, "the loop goes on for ever"
        if self.news:
            self.news.pop(0)()
        elif math.isfinite(pause.seconds):
            self.clock.wait(pause.seconds)
        else:
            pause.stop()

    def recover(self, request: layout_request.Request) -> None:
        if self.has_recovered:
            return
        self.recovered_layouts.append(request.layout)
        if self.recoveries:
            raise self.recoveries.pop(0)
        self.has_recovered = True

    @property
    def is_current(self) -> bool:
        return self.has_recovered

    def mark_outdated(self) -> None:
        self.has_recovered = False

    def stop(self) -> None:
        self.stops += 1

    def restore_without_request(self) -> bool:
        self.restore_retries -= 1
        self.finished_restores += self.restore_retries < 0
        return self.restore_retries >= 0

    def awaits_driver(self, _outcome: outcomes.Outcome | None) -> bool:
        return self.is_driver_away

    def check_without_request(self) -> actions.Action:
        self.drift_checks += 1
        action, self.next_action = self.next_action, actions.Action.REST
        return action

    def forget_node(self) -> None:
        self.forgotten += 1
        self.mark_outdated()

    def check_drift(
        self, request: layout_request.Request, outcome: outcomes.Outcome
    ) -> actions.Action:
        assert request.layout == self.runs[-1][0]
        assert not outcome.should_retry
        return self.check_without_request()

    def run(
        self,
        request: layout_request.Request,
        cancel: ports.Cancellation,
        options: layout_request.AttemptOptions = layout_request.DEFAULT_OPTIONS,
    ) -> outcomes.Outcome:
        self.runs.append((request.layout, options.attempt))
        self.delays_s.append(options.retry_after_s)
        self.are_heals.append(options.is_heal)
        self.are_new.append(options.is_new)
        self.on_run(cancel)
        answer = self._script.pop(0)
        if not self._script:
            self.inbox.stop()
        if isinstance(answer, Exception):
            raise answer
        is_good = answer is Reason.APPLIED
        state = run_status.State.SUCCESS if is_good else run_status.State.FAILED
        return outcomes.Outcome(
            state=state,
            reason=answer,
            description="",
            should_retry=answer.is_transient,
            verified_gpus=self.verified_gpus,
        )


def pauses(retry_s: float = 0.01, drift_check_s: float = 0.0) -> agent_settings.RunSettings:
    return agent_settings.RunSettings(
        retry_initial_s=retry_s, retry_max_s=2 * retry_s, drift_check_interval_s=drift_check_s
    )


def agent(
    reconciler: ScriptedReconciler,
    settings: agent_settings.RunSettings | None = None,
    **options: Any,
) -> loop.AgentLoop:
    return loop.AgentLoop(
        reconciler,
        reconciler.inbox,
        settings or pauses(),
        monotonic=reconciler.clock.monotonic,
        **options,
    )


def serve(
    reconciler: ScriptedReconciler,
    settings: agent_settings.RunSettings | None = None,
    **options: Any,
) -> None:
    """Run the loop until it has nothing more to do."""
    agent(reconciler, settings, **options).serve()
