"""The agent's loop: serve a wish, back off, rest, and look at the GPUs now and then."""

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog
import tenacity

from mig_manager import errors
from mig_manager.agent import health, outcomes, record, request
from mig_manager.change import instrumentation
from mig_manager.core import ports

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class Pipeline(Protocol):
    """What the loop needs of ``reconcile.Reconciler``."""

    def recover(self, name: str | None) -> None:
        """See ``reconcile.Reconciler.recover``."""

    def rest(self) -> bool:
        """See ``reconcile.Reconciler.rest``."""

    def stop(self) -> None:
        """See ``reconcile.Reconciler.stop``."""

    def run(
        self,
        name: str,
        wish: ports.Cancellation,
        *,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        spares: bool = False,
    ) -> outcomes.Outcome:
        """See ``reconcile.Reconciler.run``."""

    def look(self, name: str, ended: outcomes.Outcome) -> outcomes.Next:
        """See ``reconcile.Reconciler.look``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the agent lets things be; seconds."""

    retry_initial_s: float
    retry_max_s: float
    look_after_s: float = 0.0
    """Pause between two looks at the GPUs at rest; 0: none but those that somebody asks for."""


class Agent:
    """Serves the wishes of one node, one at a time."""

    def __init__(
        self,
        pipeline: Pipeline,
        box: request.Mailbox,
        *,
        patience: Patience,
        telemetry: instrumentation.Telemetry | None = None,
        pulse: health.Pulse | None = None,
        alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare to serve.

        Args:
            pipeline: What is run for each wish.
            box: Where wishes come from.
            patience: How long things are let be.
            telemetry: Told of tries and retries.
            pulse: Told that the worker is alive.
            alone: Makes the context of a run, in which we hold nothing else of the driver.
        """
        self._alone = alone
        self._pipeline = pipeline
        self._box = box
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._pulse = pulse or health.Pulse()
        self._look_after_s = patience.look_after_s or None
        self._retry_max_s = patience.retry_max_s
        self._backoff = tenacity.wait_exponential_jitter(
            multiplier=patience.retry_initial_s,
            max=patience.retry_max_s,
            jitter=patience.retry_initial_s,
        )
        self._is_recovered = False
        self._served: request.LabelWish | None = None
        self._ended: outcomes.Outcome | None = None
        """How the last run for that wish ended; None while that is not settled."""

    @property
    def is_recovered(self) -> bool:
        """Whether what an interrupted run left taken has been taken over."""
        return self._is_recovered

    @property
    def _next_look_s(self) -> float | None:
        """How long to rest before the next look at the GPUs; None: until somebody asks."""
        if self._ended is None or not self._ended.unreachable:
            return self._look_after_s
        # As with other failures that pass: an unreachable GPU may be back.
        return min(self._look_after_s or self._retry_max_s, self._retry_max_s)

    def serve(self) -> None:
        """Serve wishes until the mailbox stops."""
        seen = 0
        while True:
            wish = self._resting(
                functools.partial(self._box.next, seen, timeout_s=self._next_look_s)
            )
            if wish is not None:
                seen = wish.generation
                self._served = wish
                self._guarded(functools.partial(self._fulfil, wish))
            elif self._box.is_stopping:
                self._stop()
                return
            else:
                self._guarded(self._look)

    def _stop(self) -> None:
        try:
            self._pipeline.stop()
        except errors.ClusterError as error:
            _log.warning("node_not_reopened", reason=error.reason.value, error=error.message)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except errors.Superseded as end:
            _log.info("wish_ended", why=end.why)
        finally:
            structlog.contextvars.unbind_contextvars("attempt_id")

    def _look(self) -> None:
        """See whether the GPUs are still as the last run left them."""
        wish, ended = self._served, self._ended
        if wish is None or wish.name is None or ended is None:
            return
        try:
            due = self._pipeline.look(wish.name, ended)
        except errors.ClusterError as error:
            _log.warning("look_not_told", reason=error.reason.value, error=error.message)
            return
        match due:
            case outcomes.Next.REST:
                return
            case outcomes.Next.HEAL:
                self._fulfil(wish, spares=True)
            case outcomes.Next.RUN:
                self._fulfil(wish)

    def _fulfil(self, wish: request.LabelWish, *, spares: bool = False) -> None:
        """Try one wish until it is in force, cannot be, or is no longer wanted."""
        self._ended = None
        attempt = _Attempt(self._backoff)
        retrying = tenacity.Retrying(
            wait=attempt.delay,
            retry=tenacity.retry_if_result(bool),
            stop=tenacity.stop_never,
            sleep=lambda seconds: self._resting(functools.partial(wish.wait, seconds)),
            before_sleep=self._announce_retry,
        )
        retrying(lambda: self._begin(wish, attempt.begin(), spares=spares))

    def _begin(self, wish: request.LabelWish, attempt: record.Try, *, spares: bool) -> bool:
        with self._alone():
            return self._try(wish, attempt, spares=spares)

    def _try(self, wish: request.LabelWish, attempt: record.Try, *, spares: bool) -> bool:
        """Run the pipeline once; tell whether to try again."""
        structlog.contextvars.bind_contextvars(attempt_id=secrets.token_hex(4))
        self._telemetry.attempt_began(attempt.number)
        try:
            if not self._is_recovered:
                self._pipeline.recover(wish.name)
                self._is_recovered = True
            if wish.name is None:
                return self._pipeline.rest()
            outcome = self._pipeline.run(
                wish.name,
                _Watched(wish, self._pulse),
                attempt=attempt.number,
                retry_after_s=attempt.retry_after_s,
                spares=spares,
            )
        except errors.LockedError as error:
            _log.info("recovery_waits", error=error.message)
            return True
        except errors.ClusterError as error:
            # The run could not say how it ended; its journal tells the next try.
            self._is_recovered = False
            _log.warning("api_unreachable", reason=error.reason.value, error=error.message)
            self._telemetry.outcome_lost(error.reason)
            return True
        if not outcome.should_retry:
            self._ended = outcome
        return outcome.should_retry

    def _announce_retry(self, state: tenacity.RetryCallState) -> None:
        delay_s = state.upcoming_sleep
        _log.info("retry_scheduled", attempt=state.attempt_number, delay_s=round(delay_s, 2))
        self._telemetry.retry_scheduled(delay_s)

    def _resting(self, wait: Callable[[], _Result]) -> _Result:
        """Wait for something that may never come."""
        self._pulse.rest()
        try:
            return wait()
        finally:
            self._pulse.beat()


class _Attempt:
    """Counts the tries at a wish; knows before each how long the pause after it will be."""

    def __init__(self, backoff: tenacity.wait.wait_base) -> None:
        self._backoff = backoff
        self._number = 0
        self._delay_s = 0.0

    def begin(self) -> record.Try:
        """Return the next try."""
        self._number += 1
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = self._number
        self._delay_s = float(self._backoff(state))
        return record.Try(number=self._number, retry_after_s=self._delay_s)

    def delay(self, _state: tenacity.RetryCallState) -> float:
        """Return the pause after the try that has ended."""
        return self._delay_s


class _Watched:
    """A wish whose every question is a sign of life; implements ``ports.Cancellation``."""

    def __init__(self, wish: ports.Cancellation, pulse: health.Pulse) -> None:
        self._wish = wish
        self._pulse = pulse

    def check(self) -> None:
        self._pulse.beat()
        self._wish.check()

    def wait(self, seconds: float) -> None:
        self._pulse.beat()
        self._wish.wait(seconds)

    def pause(self, seconds: float) -> None:
        self._pulse.beat()
        self._wish.pause(seconds)
