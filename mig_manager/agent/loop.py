"""The agent's loop: serve a request, retry with backoff, rest, and check for drift."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable

import structlog

from mig_manager import errors
from mig_manager.agent import agent_settings, intake, layout_request, outcomes, reconcile
from mig_manager.agent.drift import actions
from mig_manager.core import liveness, ports, timing

_log = structlog.get_logger()


class AgentLoop:
    """Serves the requests of one node, one at a time."""

    def __init__(  # noqa: PLR0913 - each is named where it is called
        self,
        reconciler: reconcile.Reconciler,
        inbox: intake.Inbox,
        settings: agent_settings.RunSettings,
        *,
        telemetry: ports.Telemetry | None = None,
        pulse: liveness.Pulse | None = None,
        suspend_gpu_events: Callable[
            [], contextlib.AbstractContextManager[None]
        ] = contextlib.nullcontext,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reconciler = reconciler
        self._inbox = inbox
        self._telemetry = telemetry or ports.Telemetry()
        self._pulse = pulse or liveness.Pulse(monotonic)
        self._suspend_gpu_events = suspend_gpu_events
        self._monotonic = monotonic
        self._settings = settings
        self._backoff = timing.Backoff(
            first_s=settings.retry_initial_s, max_s=settings.retry_max_s, factor=2.0
        )
        self._run_generation = 0
        """The generation of the request when the last run began."""

    def serve(self) -> None:
        """Serve requests until the inbox stops."""
        served: intake.ReceivedRequest | None = None
        outcome: outcomes.Outcome | None = None
        while True:
            generation = served.generation if served else 0
            self._idle(self._next_check_s(outcome), generation, at_rest=True)
            received = self._inbox.next(generation)
            if received is None and self._inbox.is_stopping:
                try:
                    self._reconciler.stop()
                except errors.ClusterError as error:
                    reason = error.reason.value
                    _log.warning("node_not_reopened", reason=reason, error=error.message)
                return
            try:
                if received is not None:
                    if served is not None and served.node_uid != received.node_uid:
                        self._reconciler.forget_node()
                    served = received
                    outcome = self._serve(received)
                elif served is not None:
                    outcome = self._check_drift(served, outcome)
            except errors.Superseded as end:
                _log.info("request_superseded", why=end.why)
            finally:
                structlog.contextvars.unbind_contextvars("attempt_id")

    def _idle(self, limit_s: float, generation: int, *, at_rest: bool = False) -> None:
        """Wait until ``generation`` is superseded; meanwhile publish conditions and the use.

        The wait may never end, so the pulse expects no report.
        """
        node = self._reconciler.node
        capacity = self._reconciler.capacity
        attempt = 0
        until_s = self._monotonic() + limit_s
        write_at_s = self._monotonic() + self._backoff.delay_s(0)
        while True:
            capacity.follow(
                is_on_demand=self._inbox.is_on_demand, has_changed=self._inbox.take_use_change()
            )
            next_s = min(until_s, write_at_s if node.has_unwritten_condition else math.inf)
            pause_s = min(max(0.0, next_s - self._monotonic()), capacity.next_in_s)
            timeout_s = pause_s if math.isfinite(pause_s) else None
            self._pulse.rest()
            try:
                is_over = self._inbox.wait_until_superseded(
                    generation, at_rest=at_rest, timeout_s=timeout_s
                )
            finally:
                self._pulse.beat()
            if is_over:
                return
            if capacity.next_in_s <= 0:
                capacity.refresh()
            if self._monotonic() >= until_s:
                return
            if node.has_unwritten_condition and self._monotonic() >= write_at_s:
                node.retry_condition()
                attempt += 1
                write_at_s = self._monotonic() + self._backoff.delay_s(attempt)

    def _serve(
        self, received: intake.ReceivedRequest, *, is_heal: bool = False
    ) -> outcomes.Outcome | None:
        """Run the pipeline with backoff until the outcome is final; return it, if a layout ran."""
        attempt = 0
        while True:
            attempt += 1
            # Computed before the run, because its status names the time of the next attempt.
            spread_s = random.uniform(0, self._settings.retry_initial_s)  # noqa: S311 - a spread
            delay_s = min(
                self._settings.retry_max_s, self._backoff.delay_s(attempt - 1) + spread_s
            )
            options = layout_request.AttemptOptions(
                attempt=attempt,
                is_new=received.since > self._run_generation,
                is_heal=is_heal,
                retry_after_s=delay_s,
            )
            with self._suspend_gpu_events():
                outcome, must_retry = self._try(received, options)
            if not must_retry:
                return outcome
            if outcome:
                delay_s = outcome.retry_after_s(attempt, delay_s)
            _log.info("retry_scheduled", attempt=attempt, delay_s=round(delay_s, 2))
            self._telemetry.retry_scheduled(delay_s)
            self._idle(delay_s, received.generation)
            received.check()

    def _try(
        self, received: intake.ReceivedRequest, options: layout_request.AttemptOptions
    ) -> tuple[outcomes.Outcome | None, bool]:
        """Run the pipeline once; return the outcome, if it was published, and whether to retry."""
        structlog.contextvars.bind_contextvars(attempt_id=secrets.token_hex(4))
        self._telemetry.attempt_began(options.attempt)
        try:
            self._reconciler.recover(received.request)
            if not received.request.layout:
                return None, self._reconciler.restore_without_request()
            self._run_generation = received.generation
            outcome = self._reconciler.run(received.request, received, options)
        except errors.LockedError as error:
            _log.info("recovery_waits", error=error.message)
            return None, True
        except errors.ClusterError as error:
            # The run published no outcome; the next attempt reads its journal.
            self._reconciler.mark_outdated()
            _log.warning("api_unreachable", reason=error.reason.value, error=error.message)
            self._telemetry.outcome_lost(error.reason)
            return None, True
        return outcome, outcome.should_retry

    def _next_check_s(self, outcome: outcomes.Outcome | None) -> float:
        """Return how long to rest before the next drift check; inf: until a GPU event."""
        check_s = self._settings.drift_check_interval_s or math.inf
        if self._reconciler.awaits_driver(outcome):
            return min(check_s, outcomes.MAX_DRIVER_PAUSE_S)
        if outcome is None or not outcome.verified_gpus.unreachable:
            return check_s
        # Check as often as retries: an unreachable GPU may be back.
        return min(check_s, self._settings.retry_max_s)

    def _check_drift(
        self, received: intake.ReceivedRequest, outcome: outcomes.Outcome | None
    ) -> outcomes.Outcome | None:
        """Check whether the GPUs have the layout, act, and return the outcome of the last run."""
        try:
            if not received.request.layout:
                action = self._reconciler.check_without_request()
            elif outcome is None:
                return outcome
            else:
                action = self._reconciler.check_drift(received.request, outcome)
        except errors.MigManagerError as error:
            _log.warning("drift_not_published", reason=error.reason.value, error=error.message)
            return outcome
        match action:
            case actions.Action.REST:
                return outcome
            case actions.Action.HEAL:
                return self._serve(received, is_heal=True)
            case actions.Action.RUN:
                return self._serve(received)
