"""Serve liveness, readiness and metrics over HTTP."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import structlog

from mig_manager import errors

STUCK_MARGIN_S = 300.0
"""What a live loop may take between two reports, beyond its longest operation."""
CONTACT_WITHIN_S = 180.0
"""An idle watch of the node gets a bookmark each minute; a dead one is noticed within 90 s."""

_log = structlog.get_logger()


class Pulse:
    """When the loop last reported that it is alive; for any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = math.inf

    def beat(self) -> None:
        """Report that the loop is alive; the next report must come within a bound."""
        self._last = self._monotonic()

    def rest(self) -> None:
        """Begin a wait that may never end; no report is expected before the next ``beat``."""
        self._last = math.inf

    @property
    def silence_s(self) -> float:
        """How long a report has been overdue; 0 while none is expected."""
        return max(0.0, self._monotonic() - self._last)


class Health:
    """Answers kubelet's probes."""

    def __init__(
        self,
        pulse: Pulse,
        *,
        stuck_after_s: float,
        contact_age_s: Callable[[], float],
        is_recovered: Callable[[], bool],
    ) -> None:
        self._pulse = pulse
        self._stuck_after_s = stuck_after_s
        self._contact_age_s = contact_age_s
        self._is_recovered = is_recovered

    def why_dead(self) -> str:
        """Return why only a restart helps; empty: the loop is alive."""
        silence = self._pulse.silence_s
        if silence < self._stuck_after_s:
            return ""
        return f"the worker has been stuck for {silence:.0f} s"

    def why_unready(self) -> str:
        """Return why requests are not served now; empty: they are."""
        age = self._contact_age_s()
        if math.isinf(age):
            return "the Kubernetes API has not been reached yet"
        if age >= CONTACT_WITHIN_S:
            return f"the Kubernetes API has not been heard of for {age:.0f} s"
        if not self._is_recovered():
            return "what an earlier run took is not restored yet"
        return self.why_dead()


@contextlib.contextmanager
def served(
    health: Health, exposition: Callable[[], bytes], *, address: str, port: int
) -> Iterator[int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics``; yield the port (0: any free one).

    Raises:
        UsageError: The port is taken, or not permitted.
    """
    # An agent that serves no pages need not carry the server.
    from mig_manager.adapters.host import web_server  # noqa: PLC0415

    def page(why: str) -> web_server.Page:
        return web_server.Page(body=f"{why or 'ok'}\n".encode(), is_good=not why)

    pages = {
        "/healthz": lambda: page(health.why_dead()),
        "/readyz": lambda: page(health.why_unready()),
        "/metrics": lambda: web_server.Page(body=exposition(), content_type=web_server.METRICS),
    }
    try:
        server = web_server.WebServer(pages, address=address, port=port)
    except OSError as error:
        raise errors.UsageError(
            f"cannot listen on {address or '*'}:{port}: {error.strerror or error}"
        ) from error
    with server.running():
        _log.info("health_served", address=address or "*", port=server.port)
        yield server.port
