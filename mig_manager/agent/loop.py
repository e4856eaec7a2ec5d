"""The agent's loop: serve a request, retry with backoff, rest, and check for drift."""

import contextlib
import dataclasses
import functools
import math
import random
import secrets
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from mig_manager import errors
from mig_manager.agent import drift, outcomes, reconcile
from mig_manager.agent import inbox as inboxes
from mig_manager.agent import pulse as pulses
from mig_manager.core import ports, timing

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class _Wait(Protocol):
    def __call__(self, *, timeout_s: float | None) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Pauses of the loop; seconds."""

    retry_initial_s: float
    retry_max_s: float
    drift_check_s: float = 0.0
    """Between two drift checks; 0: only when a GPU event asks for one."""


class Agent:
    """Serves the requests of one node, one at a time."""

    def __init__(  # noqa: PLR0913 - each is named where it is called
        self,
        pipeline: reconcile.Reconciler,
        inbox: inboxes.Inbox,
        *,
        intervals: Intervals,
        telemetry: ports.Telemetry | None = None,
        pulse: pulses.Pulse | None = None,
        alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._inbox = inbox
        self._telemetry = telemetry or ports.Telemetry()
        self._pulse = pulse or pulses.Pulse()
        self._alone = alone
        self._monotonic = monotonic
        self._drift_check_s = intervals.drift_check_s or None
        self._retry_max_s = intervals.retry_max_s
        self._retry_initial_s = intervals.retry_initial_s
        self._backoff = timing.Backoff(
            first_s=intervals.retry_initial_s, max_s=intervals.retry_max_s, factor=2.0
        )
        self.is_recovered = False
        self._served: inboxes.Wanted | None = None
        self._ended: outcomes.Outcome | None = None
        """How the last run for that request ended; None while it is retried."""
        self._is_new = False
        """Whether label or annotation have changed since the last run began."""

    def serve(self) -> None:
        """Serve requests until the inbox stops."""
        seen = 0
        while True:
            request = self._next(seen)
            if request is None and self._inbox.is_stopping:
                try:
                    self._pipeline.stop()
                except errors.ClusterError as error:
                    reason = error.reason.value
                    _log.warning("node_not_reopened", reason=reason, error=error.message)
                return
            try:
                if request is None:
                    self._check_drift()
                else:
                    self._begin(request, is_new=request.since > seen)
                    seen = request.generation
                    self._serve(request)
            except errors.Superseded as end:
                _log.info("request_superseded", why=end.why)
            finally:
                structlog.contextvars.unbind_contextvars("attempt_id")

    def _next(self, seen: int) -> inboxes.Wanted | None:
        """Wait as ``Inbox.next``, with the next drift check as the time-out."""
        self._idle(self._next_check_s or math.inf, functools.partial(self._inbox.has_news, seen))
        return self._inbox.next(seen, timeout_s=0)

    def _idle(self, limit_s: float, is_over: _Wait) -> None:
        """Wait; meanwhile write a condition that could not be written, and publish the use."""
        pipeline, capacity, attempt = self._pipeline, self._pipeline.capacity, 0
        until_s = self._monotonic() + limit_s
        write_at_s = self._monotonic() + self._backoff.delay_s(0)
        while True:
            capacity.follow(
                is_on_demand=self._inbox.is_on_demand, has_changed=self._inbox.take_use_change()
            )
            next_s = min(until_s, write_at_s if pipeline.has_unwritten_condition else math.inf)
            pause_s = min(max(0.0, next_s - self._monotonic()), capacity.next_in_s)
            timeout_s = pause_s if math.isfinite(pause_s) else None
            if self._rest(functools.partial(is_over, timeout_s=timeout_s)):
                return
            if capacity.next_in_s <= 0:
                capacity.refresh()
            if self._monotonic() >= until_s:
                return
            if pipeline.has_unwritten_condition and self._monotonic() >= write_at_s:
                pipeline.retry_condition()
                attempt += 1
                write_at_s = self._monotonic() + self._backoff.delay_s(attempt)

    def _begin(self, request: inboxes.Wanted, *, is_new: bool) -> None:
        """Note what a request is about, before it is served."""
        if self._served is not None and self._served.node_uid != request.node_uid:
            self._pipeline.forget_node()
        self._served = request
        self._is_new |= is_new

    def _serve(self, request: inboxes.Wanted, *, may_evict: bool = True) -> None:
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
            self._idle(delay_s, functools.partial(self._inbox.is_over, request.generation))
            request.check()

    def _try(
        self, request: inboxes.Wanted, attempt: int, retry_after_s: float, *, may_evict: bool
    ) -> bool:
        """Run the pipeline once; return whether to retry."""
        structlog.contextvars.bind_contextvars(attempt_id=secrets.token_hex(4))
        self._telemetry.attempt_began(attempt)
        try:
            if not self.is_recovered:
                self._pipeline.recover(request.name, request.custom)
                self.is_recovered = True
            if request.name is None:
                return self._pipeline.rest()
            is_new, self._is_new = self._is_new, False
            outcome = self._pipeline.run(
                request.name,
                _Watched(request, self._pulse),
                custom=request.custom,
                attempt=attempt,
                retry_after_s=retry_after_s,
                is_new=is_new,
                may_evict=may_evict,
            )
        except errors.LockedError as error:
            _log.info("recovery_waits", error=error.message)
            return True
        except errors.ClusterError as error:
            # The run could not publish its outcome; the next attempt reads its journal.
            self.is_recovered = False
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
            action = self._pipeline.check_drift(request.name, ended, request.custom)
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

    def _rest(self, wait: Callable[[], _Result]) -> _Result:
        """Wait for something that may never come."""
        self._pulse.rest()
        try:
            return wait()
        finally:
            self._pulse.beat()


class _Watched:
    """Implements ``ports.Cancellation``: each check reports that the loop is alive."""

    def __init__(self, request: ports.Cancellation, pulse: pulses.Pulse) -> None:
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
