"""The agent's loop: serve a request, retry with backoff, rest, and check for drift."""

import contextlib
import dataclasses
import functools
import random
import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from mig_manager import errors
from mig_manager.agent import drift, health, outcomes
from mig_manager.agent import request as requests
from mig_manager.change import instrumentation
from mig_manager.core import ports, timing

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class Pipeline(Protocol):
    """What the loop needs of ``reconcile.Reconciler``; see there."""

    def recover(self, name: str | None) -> None: ...  # noqa: D102
    def rest(self) -> bool: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102
    def run(  # noqa: D102
        self,
        name: str,
        request: ports.Cancellation,
        *,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        may_evict: bool = True,
    ) -> outcomes.Outcome: ...
    def check_drift(self, name: str, ended: outcomes.Outcome) -> drift.Action: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Pauses of the loop; seconds."""

    retry_initial_s: float
    retry_max_s: float
    drift_check_s: float = 0.0
    """Between two drift checks; 0: only when a GPU event asks for one."""


class Agent:
    """Serves the requests of one node, one at a time."""

    def __init__(
        self,
        pipeline: Pipeline,
        inbox: requests.Inbox,
        *,
        intervals: Intervals,
        telemetry: instrumentation.Telemetry | None = None,
        pulse: health.Pulse | None = None,
        alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._pipeline = pipeline
        self._inbox = inbox
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._pulse = pulse or health.Pulse()
        self._alone = alone
        self._drift_check_s = intervals.drift_check_s or None
        self._retry_max_s = intervals.retry_max_s
        self._retry_initial_s = intervals.retry_initial_s
        self._backoff = timing.Backoff(
            first_s=intervals.retry_initial_s, max_s=intervals.retry_max_s, factor=2.0
        )
        self._is_recovered = False
        self._served: requests.Request | None = None
        self._ended: outcomes.Outcome | None = None
        """How the last run for that request ended; None while it is retried."""

    @property
    def is_recovered(self) -> bool:
        """Whether the agent has taken over from an interrupted run."""
        return self._is_recovered

    def serve(self) -> None:
        """Serve requests until the inbox stops."""
        seen = 0
        while True:
            request = self._rest(
                functools.partial(self._inbox.next, seen, timeout_s=self._next_check_s)
            )
            if request is None and self._inbox.is_stopping:
                self._stop()
                return
            try:
                if request is None:
                    self._check_drift()
                else:
                    seen = request.generation
                    self._served = request
                    self._serve(request)
            except errors.Superseded as end:
                _log.info("request_superseded", why=end.why)
            finally:
                structlog.contextvars.unbind_contextvars("attempt_id")

    def _serve(self, request: requests.Request, *, may_evict: bool = True) -> None:
        """Run the pipeline until the outcome is final, with backoff between the attempts."""
        self._ended = None
        attempt = 0
        while True:
            attempt += 1
            # Known before the run, because its status names the time of the next attempt.
            spread_s = random.uniform(0, self._retry_initial_s)  # noqa: S311 - a spread
            delay_s = min(self._retry_max_s, self._backoff.delay_s(attempt - 1) + spread_s)
            with self._alone():
                if not self._try(request, attempt, delay_s, may_evict=may_evict):
                    return
            _log.info("retry_scheduled", attempt=attempt, delay_s=round(delay_s, 2))
            self._telemetry.retry_scheduled(delay_s)
            self._rest(functools.partial(request.wait, delay_s))

    def _try(
        self, request: requests.Request, attempt: int, retry_after_s: float, *, may_evict: bool
    ) -> bool:
        """Run the pipeline once; return whether to retry."""
        structlog.contextvars.bind_contextvars(attempt_id=secrets.token_hex(4))
        self._telemetry.attempt_began(attempt)
        try:
            if not self._is_recovered:
                self._pipeline.recover(request.name)
                self._is_recovered = True
            if request.name is None:
                return self._pipeline.rest()
            outcome = self._pipeline.run(
                request.name,
                _Watched(request, self._pulse),
                attempt=attempt,
                retry_after_s=retry_after_s,
                may_evict=may_evict,
            )
        except errors.LockedError as error:
            _log.info("recovery_waits", error=error.message)
            return True
        except errors.ClusterError as error:
            # The run could not publish its outcome; the next attempt reads its journal.
            self._is_recovered = False
            _log.warning("api_unreachable", reason=error.reason.value, error=error.message)
            self._telemetry.outcome_lost(error.reason)
            return True
        if not outcome.should_retry:
            self._ended = outcome
        return outcome.should_retry

    @property
    def _next_check_s(self) -> float | None:
        """How long to rest before the next drift check; None: until a GPU event."""
        if self._ended is None or not self._ended.gpus.unreachable:
            return self._drift_check_s
        # As often as a retry: an unreachable GPU may be back.
        return min(self._drift_check_s or self._retry_max_s, self._retry_max_s)

    def _check_drift(self) -> None:
        request, ended = self._served, self._ended
        if request is None or request.name is None or ended is None:
            return
        try:
            action = self._pipeline.check_drift(request.name, ended)
        except errors.ClusterError as error:
            _log.warning("drift_not_published", reason=error.reason.value, error=error.message)
            return
        match action:
            case drift.Action.REST:
                return
            case drift.Action.HEAL:
                self._serve(request, may_evict=False)
            case drift.Action.RUN:
                self._serve(request)

    def _stop(self) -> None:
        try:
            self._pipeline.stop()
        except errors.ClusterError as error:
            _log.warning("node_not_reopened", reason=error.reason.value, error=error.message)

    def _rest(self, wait: Callable[[], _Result]) -> _Result:
        """Wait for something that may never come."""
        self._pulse.rest()
        try:
            return wait()
        finally:
            self._pulse.beat()


class _Watched:
    """Implements ``ports.Cancellation``: each check reports that the loop is alive."""

    def __init__(self, request: ports.Cancellation, pulse: health.Pulse) -> None:
        self._request = request
        self._pulse = pulse

    def check(self) -> None:
        self._pulse.beat()
        self._request.check()

    def wait(self, seconds: float) -> None:
        self._pulse.beat()
        self._request.wait(seconds)

    def pause(self, seconds: float) -> None:
        self._pulse.beat()
        self._request.pause(seconds)
