"""Failures on demand, and what the server has been asked so far; both for tests."""

import collections
import dataclasses
import enum
import re
import threading
from collections.abc import Mapping

LOG_LIMIT = 10_000
"""Number of requests remembered."""


class Break(enum.Enum):
    """How a watch that is under way can end or fail."""

    CLOSE = "close"
    """Cleanly, as at its time-out."""
    EXPIRE = "expire"
    """With an ERROR event that carries 410."""
    RESET = "reset"
    """With a connection reset."""
    TRUNCATE = "truncate"
    """In the middle of a JSON line."""
    STALL = "stall"
    """Not at all: the connection stays open and silent, as behind a dead NAT."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure to inject, and the requests that it strikes.

    With none of ``status``, ``reset``, ``truncate``, ``garbles`` and ``stall`` the request is
    merely delayed by ``hang_s``.
    """

    method: str = ""
    """HTTP method; empty strikes any."""
    verb: str = ""
    """Kubernetes verb, such as ``watch``; empty strikes any."""
    resource: str = ""
    """Such as ``nodes`` or ``pods/eviction``; empty strikes any."""
    path: str = ""
    """Regular expression searched for in path and query; empty strikes any."""
    token: str = ""
    """Bearer token of the client to strike; empty strikes any."""
    skip: int = 0
    """Number of such requests that pass first."""
    times: int | None = 1
    """Number of such requests that are struck; None for all."""
    hang_s: float = 0
    """Seconds before anything else happens."""
    status: int | None = None
    """HTTP status to answer with, in a fitting Status object."""
    retry_after_s: int | None = None
    message: str = "injected fault"
    reset: bool = False
    """Reset the connection in place of an answer."""
    truncate: bool = False
    """Close the connection in the middle of the answer; of a watch, in its first line."""
    garbles: bool = False
    """Answer 200 with the page of a proxy in place of JSON; of a watch, as its first line."""
    stall: bool = False
    """Never answer; of a watch, send the headers and nothing else."""
    is_carried_out: bool = False
    """Whether the request has its effect, and only its answer is replaced."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    query: Mapping[str, str]
    verb: str
    """Kubernetes verb; empty for discovery and health."""
    resource: str
    """Such as ``nodes`` or ``pods/eviction``; empty for discovery and health."""
    user_agent: str
    token: str
    """Bearer token; empty when there is none."""
    content_type: str


class FaultBox:
    """The faults that are waiting to strike; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, list[int]]] = []

    def inject(self, fault: Fault) -> None:
        """Let a fault strike from now on; older ones strike first."""
        with self._lock:
            self._faults.append((fault, [0]))

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def waiting(self) -> int:
        """Return how many faults have strikes left; one without end always has."""
        with self._lock:
            return sum(
                fault.times is None or seen[0] < fault.skip + fault.times
                for fault, seen in self._faults
            )

    def take(self, asked: Asked, target: str) -> Fault | None:
        """Return the fault that strikes a request, and count it.

        Args:
            asked: The request.
            target: Its path with its query.
        """
        with self._lock:
            for fault, seen in self._faults:
                if _is_meant(fault, asked, target):
                    seen[0] += 1
                    if _strikes(fault, seen[0]):
                        return fault
        return None


def _is_meant(fault: Fault, asked: Asked, target: str) -> bool:
    return (
        fault.method in ("", asked.method)
        and fault.verb in ("", asked.verb)
        and fault.resource in ("", asked.resource)
        and fault.token in ("", asked.token)
        and re.search(fault.path, target) is not None
    )


def _strikes(fault: Fault, nth: int) -> bool:
    return nth > fault.skip and (fault.times is None or nth <= fault.skip + fault.times)


class RequestLog:
    """What the server has been asked, oldest first, and how often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: collections.deque[Asked] = collections.deque(maxlen=LOG_LIMIT)
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, asked: Asked) -> None:
        """Remember a request."""
        with self._lock:
            self._requests.append(asked)
            self._counts[asked.verb, asked.resource] += 1

    def requests(self, *, verb: str = "", resource: str = "") -> list[Asked]:
        """Return the requests of a verb and resource; empty words select all."""
        with self._lock:
            return [
                each
                for each in self._requests
                if verb in ("", each.verb) and resource in ("", each.resource)
            ]

    def count(self, verb: str, resource: str) -> int:
        """Return how often a verb was asked of a resource, such as ``pods/eviction``."""
        with self._lock:
            return self._counts[verb, resource]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._requests.clear()
            self._counts.clear()
