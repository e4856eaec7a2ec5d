"""Events on their way to the API: sent in order by a thread of their own.

A change must not wait for what is said about it: an API server that is slow, or silent, costs an
Event and no time.
"""

import collections
import threading
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.core import timing

_PATH = "/api/v1/namespaces/default/events"
"""Events about objects without a namespace live here, by validation of the API server."""
_MOST_WAITING = 64
"""A change publishes about ten."""
_FORBIDDEN_REST_S = 600.0
"""A missing right may be granted, and a refused token renewed, while we run."""

_log = structlog.get_logger()


class EventSender:
    """Publishes Events; none that it takes is ever an error for who hands it over."""

    def __init__(self, kube: api.KubeApi, clock: timing.Clock) -> None:
        self._kube = kube
        self._clock = clock
        self._state = threading.Condition()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._is_sending = False
        self._quiet_until_s = 0.0

    def put(self, event: dict[str, Any]) -> None:
        """Take an Event to publish; it is dropped, and logged, where too many wait."""
        with self._state:
            if self._clock.monotonic() < self._quiet_until_s:
                return
            if len(self._waiting) == _MOST_WAITING:
                _log.warning("event_dropped", event_reason=event["reason"])
                return
            self._waiting.append(event)
            if not self._is_sending:
                # It ends once nothing waits: an agent at rest has no thread for it.
                self._is_sending = True
                threading.Thread(target=self._send, name="events", daemon=True).start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every Event is published, or was refused; return False at the time-out."""
        with self._state:
            return self._state.wait_for(lambda: not self._is_sending, timeout_s)

    def _send(self) -> None:
        while True:
            with self._state:
                if not self._waiting:
                    self._is_sending = False
                    self._state.notify_all()
                    return
                event = self._waiting.popleft()
            try:
                self._kube.post(_PATH, event)
            except errors.ClusterError as error:
                self._note(event, error)

    def _note(self, event: dict[str, Any], error: errors.ClusterError) -> None:
        """Log a refusal; without the right, which the stock GPU operator lacks, be quiet."""
        if error.reason is not errors.Reason.FORBIDDEN:
            _log.warning("event_not_published", event_reason=event["reason"], detail=error.message)
            return
        _log.info("events_forbidden", detail=error.message)
        with self._state:
            self._quiet_until_s = self._clock.monotonic() + _FORBIDDEN_REST_S
            self._waiting.clear()
