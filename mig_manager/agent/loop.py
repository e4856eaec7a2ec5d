"""The agent's loop: serve a request, retry with backoff, rest, and check for drift."""

import contextlib
import dataclasses
import functools
import math
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from mig_manager import errors
from mig_manager.agent import drift, outcomes, reconcile
from mig_manager.agent import pulse as pulses
from mig_manager.core import ports, timing
from mig_manager.core.layout import custom as customs

_MIN_PAUSE_S = 0.02
"""The shortest pause that a change in the cluster ends."""
_Result = TypeVar("_Result")

_log = structlog.get_logger()


class _Wait(Protocol):
    def __call__(self, *, timeout_s: float | None) -> bool: ...


class Inbox:
    """Keeps the newest request; an older one that was not served is dropped.

    A request is the label's value, or None without a label, with what ``custom`` stands for, and
    with a generation that grows whenever one of them, a file or the Node object changes. Only a
    change of the first two is a new request.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._name: str | None = None
        self._custom: customs.Custom | None = None
        self._node_uid = ""
        self._is_label_known = False
        self._generation = 0
        self._since = 0
        self._needs_check = False
        self.is_stopping = False
        self._has_cluster_changed = False
        self.is_on_demand = False
        self._has_use_changed = False

    def put_label(
        self, name: str | None, *, node_uid: str = "", custom: customs.Custom | None = None
    ) -> None:
        """Set the label's value, and what ``custom`` stands for; the same is no new request.

        The first value counts even without a label, because a killed run may have left a journal.
        The same value on another Node object is served again: kubelet has registered the node
        again after its deletion, and the new object lacks everything that was published.
        """
        with self._changed:
            known, self._node_uid = self._node_uid, node_uid or self._node_uid
            if custom and self._custom == dataclasses.replace(custom, is_on_demand=True):
                # Its owner takes the node back: what was to evict no pod does not begin to.
                custom = self._custom
            is_first = not self._is_label_known
            if is_first or (name, custom) != (self._name, self._custom):
                self._name, self._custom = name, custom
                self._is_label_known = True
                self._renew()
                self._since = 0 if is_first else self._generation
            elif known and known != self._node_uid:
                self._renew()

    def put_file_change(self) -> None:
        """Serve the request again, because a file that it depends on has changed.

        Before the label is known there is no request, and the first one reads the new file.
        """
        with self._changed:
            if self._is_label_known:
                self._renew()

    def put_gpu_change(self) -> None:
        """Ask for a drift check, because another program has changed the GPUs."""
        with self._changed:
            self._needs_check = True
            self._changed.notify_all()

    def put_cluster_change(self) -> None:
        """End the present pause, because a pod or the node has changed."""
        with self._changed:
            self._has_cluster_changed = True
            self._changed.notify_all()

    def put_on_demand(self, *, is_on_demand: bool) -> None:
        """Set whether the node has on-demand partitioning."""
        if is_on_demand is not self.is_on_demand:
            self.is_on_demand = is_on_demand
            self.put_use_change()

    def put_use_change(self) -> None:
        """Note that GPUs may be in other use."""
        with self._changed:
            self._has_use_changed = True
            self._changed.notify_all()

    def take_use_change(self) -> bool:
        """Return whether GPUs may be in other use since the last call."""
        with self._changed:
            has_changed, self._has_use_changed = self._has_use_changed, False
            return has_changed

    def stop(self) -> None:
        """End every wait, because the agent stops."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()

    def next(self, seen: int, *, timeout_s: float | None = None) -> "Request | None":
        """Wait for a request that is newer than ``seen``, the generation of the last one.

        Returns None when the agent stops and for a drift check: after ``timeout_s``, if given, and
        when a GPU changes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_news(seen), timeout=timeout_s)
            if self.is_stopping or self._generation <= seen:
                self._needs_check = False
                return None
            return Request(
                self,
                name=self._name,
                custom=self._custom,
                generation=self._generation,
                since=self._since,
                node_uid=self._node_uid,
            )

    def has_news(self, seen: int, *, timeout_s: float | None = None) -> bool:
        """Wait until ``next`` returns at once; return False at the time-out or a change of use."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_news(seen) or self._has_use_changed, timeout=timeout_s
            )
            return self._is_news(seen)

    def is_over(self, generation: int, *, timeout_s: float | None = None) -> bool:
        """Wait as ``has_news``, until ``generation`` is superseded."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over(generation) or self._has_use_changed, timeout=timeout_s
            )
            return self._is_over(generation)

    def end_of(self, generation: int) -> errors.Superseded | None:
        """Return why a request is superseded; None while it is not."""
        with self._changed:
            if self.is_stopping:
                return errors.Superseded(
                    "the agent is shutting down", is_replaced=False, is_stopping=True
                )
            if self._generation == generation:
                return None
            if self._name is None:
                return errors.Superseded("the label was removed", is_replaced=False)
            return errors.Superseded(
                f"label, layout or Node object changed; {self._name} is requested now",
                is_replaced=True,
            )

    def wait(self, generation: int, seconds: float) -> None:
        """Sleep until ``generation`` is superseded, at most for ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(generation), timeout=seconds)

    def pause(self, generation: int, seconds: float) -> None:
        """Sleep as ``wait``, but only until the cluster changes.

        A change since the last pause counts, too. The pause has a minimum, because changes often
        come in bursts.
        """
        first_s = min(seconds, _MIN_PAUSE_S)
        self.wait(generation, first_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_cluster_changed or self._is_over(generation),
                timeout=seconds - first_s,
            )
            self._has_cluster_changed = False

    def _is_news(self, seen: int) -> bool:
        return self.is_stopping or self._generation > seen or self._needs_check

    def _renew(self) -> None:
        self._generation += 1
        self._changed.notify_all()

    def _is_over(self, generation: int) -> bool:
        return self.is_stopping or self._generation != generation


class Request:
    """One request of the label; implements ``ports.Cancellation``."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        name: str | None,
        custom: customs.Custom | None,
        generation: int,
        since: int,
        node_uid: str,
    ) -> None:
        self._inbox = inbox
        self.name = name
        self.custom = custom  # what ``custom`` stands for; None: the name is of another source
        self.generation = generation
        self.since = since
        """The generation in which label or annotation changed; 0: they are as this process first
        read them. Later generations are changed files and new Node objects."""
        self.node_uid = node_uid

    def check(self) -> None:
        """Raise ``Superseded`` if a newer request exists or the agent stops."""
        end = self._inbox.end_of(self.generation)
        if end is not None:
            raise end

    def wait(self, seconds: float) -> None:
        """Sleep; raise ``Superseded`` as soon as the request is superseded."""
        self._inbox.wait(self.generation, seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep until the cluster changes; raise ``Superseded`` as ``wait``."""
        self._inbox.pause(self.generation, seconds)
        self.check()


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
        inbox: Inbox,
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
        self._served: Request | None = None
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

    def _next(self, seen: int) -> Request | None:
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

    def _begin(self, request: Request, *, is_new: bool) -> None:
        """Note what a request is about, before it is served."""
        if self._served is not None and self._served.node_uid != request.node_uid:
            self._pipeline.forget_node()
        self._served = request
        self._is_new |= is_new

    def _serve(self, request: Request, *, may_evict: bool = True) -> None:
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
        self, request: Request, attempt: int, retry_after_s: float, *, may_evict: bool
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
