"""What the Kubernetes API said, as values and errors of ours.

The one place that knows the ``Status`` object (``metav1.Status``, the body of every refusal) and
which HTTP status is worth which reason.
"""

import enum
import functools
import http
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tenacity

from mig_manager import errors

_REFUSED = frozenset({http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN})


class ApiError(errors.ClusterError):
    """A request to the Kubernetes API that did not do what it should.

    Attributes:
        explanation: The server's own words, without method and path; empty when there was no
            answer.
        was_sent: False when the connection failed before the request could have reached the
            server, so that even a request that must not run twice can be tried again.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: errors.Reason,
        status: int | None = None,
        retry_after_s: float | None = None,
        explanation: str = "",
        was_sent: bool = True,
    ) -> None:
        super().__init__(message, reason=reason, status=status, retry_after_s=retry_after_s)
        self.explanation = explanation
        self.was_sent = was_sent


def no_answer(request: str, detail: str, *, was_sent: bool = True) -> ApiError:
    """Return the error for a request that got no (whole) answer.

    Args:
        request: Method and path.
        detail: What went wrong, as the transport tells it.
        was_sent: Whether the server can have seen the request.
    """
    return ApiError(
        f"no answer from the Kubernetes API to {request}: {detail}",
        reason=errors.Reason.API_UNAVAILABLE,
        was_sent=was_sent,
    )


def refusal(request: str, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Return the error for an answer with an HTTP status other than 2xx."""
    document = _object_or_empty(body)
    explanation = _explain(document) or body[:200].decode(errors="replace").strip()
    return ApiError(
        f"the Kubernetes API answered {status} to {request}: {explanation or 'no explanation'}",
        reason=reason_of(status),
        status=status,
        retry_after_s=_retry_after_s(headers, document),
        explanation=explanation,
    )


def stream_error(request: str, status: Mapping[str, Any]) -> ApiError:
    """Return the error for an ERROR event, whose object is a ``Status``."""
    code = status.get("code")
    known = code if isinstance(code, int) else None
    explanation = _explain(status) or "no explanation"
    return ApiError(
        f"the Kubernetes API broke off {request}: {explanation}",
        reason=reason_of(known) if known else errors.Reason.API_ERROR,
        status=known,
        retry_after_s=_retry_after_s({}, status),
        explanation=explanation,
    )


def reason_of(status: int) -> errors.Reason:
    """Return the reason that an HTTP status stands for."""
    if status in _REFUSED:
        return errors.Reason.FORBIDDEN
    if (
        status == http.HTTPStatus.TOO_MANY_REQUESTS
        or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
    ):
        return errors.Reason.API_UNAVAILABLE
    return errors.Reason.API_ERROR


def parse(request: str, body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; an empty body is an empty object.

    Raises:
        ApiError: The body is anything else, such as a proxy's page or a cut-off answer.
    """
    if not body:
        return {}
    try:
        document = decode(body)
    except ValueError as err:
        raise _not_an_object(request, str(err)) from err
    if not isinstance(document, dict):
        raise _not_an_object(request, f"a JSON {type(document).__name__}")
    return document


def decode(body: bytes) -> object:
    """Return the JSON value in a body.

    Raises:
        ValueError: It is not JSON, or nested too deeply for the decoder.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def too_large(request: str, status: int, limit: int) -> ApiError:
    """Return the error for an answer whose body has more bytes than anything we ask for."""
    return ApiError(
        f"the Kubernetes API's answer to {request} has more than {limit >> 20} MiB",
        reason=errors.Reason.API_ERROR,
        status=status,
    )


def _not_an_object(request: str, found: str) -> ApiError:
    return ApiError(
        f"the Kubernetes API's answer to {request} is not a JSON object: {found}",
        reason=errors.Reason.API_UNAVAILABLE,
    )


def _object_or_empty(body: bytes) -> dict[str, Any]:
    try:
        document = decode(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _explain(status: Mapping[str, Any]) -> str:
    """Join a Status's message and its causes; a blocked eviction names its budget only there."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    said = [str(status.get("message") or "")]
    said += [str(cause.get("message") or "") for cause in causes or () if isinstance(cause, dict)]
    return " ".join(words for words in said if words)


def _retry_after_s(headers: Mapping[str, str], status: Mapping[str, Any]) -> float | None:
    """Read how long to wait; the header may also be a date, which no API server sends."""
    details = status.get("details")
    asked = headers.get("Retry-After") or (
        details.get("retryAfterSeconds") if isinstance(details, dict) else None
    )
    try:
        seconds = float(asked) if asked is not None else 0.0
    except (TypeError, ValueError):
        return None
    return seconds if 0 < seconds < math.inf else None


_ATTEMPTS = 4
_LONGEST_RETRY_AFTER_S = 10.0
"""A server that asks for more gets its error passed on, with the delay, for the caller to plan."""

_READ_RETRIES = frozenset({429, 500, 502, 503, 504})
_WRITE_RETRIES = frozenset({429, 503})
"""The statuses with which a server says that it has not acted."""


class When(enum.Enum):
    """When a request may be sent again."""

    READ = enum.auto()
    """Whenever it may help."""
    IDEMPOTENT = enum.auto()
    """Also after a broken connection: doing it twice is doing it once."""
    UNSENT = enum.auto()
    """Only if the server cannot have acted on it."""
    NEVER = enum.auto()


def retrying(
    when: When,
    *,
    limit_s: float,
    ended: threading.Event,
    sleep: Callable[[float], object],
) -> tenacity.Retrying:
    """Return what calls a function until it succeeds or repeating it is in vain.

    Args:
        when: What the request is like.
        limit_s: After this long no further attempt begins.
        ended: No further attempt begins once it is set.
        sleep: Waits between attempts.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(functools.partial(_may_repeat, when)),
        stop=tenacity.stop_any(
            tenacity.stop_after_attempt(_ATTEMPTS),
            tenacity.stop_after_delay(limit_s),
            tenacity.stop_when_event_set(ended),
        ),
        wait=_wait_s,
        sleep=functools.partial(_discard, sleep),
        reraise=True,
    )


def _may_repeat(when: When, err: BaseException) -> bool:
    if not isinstance(err, ApiError) or when is When.NEVER:
        return False
    if (err.retry_after_s or 0.0) > _LONGEST_RETRY_AFTER_S:
        return False
    if err.status is not None:
        return err.status in (_READ_RETRIES if when is When.READ else _WRITE_RETRIES)
    return not (when is When.UNSENT and err.was_sent)


_backoff_s = tenacity.wait_random_exponential(multiplier=0.25, max=2.0)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Wait as long as the server asks; else a random time, for a whole cluster may be waiting."""
    err = state.outcome.exception() if state.outcome else None
    if isinstance(err, ApiError) and err.retry_after_s is not None:
        return err.retry_after_s
    return _backoff_s(state)


def _discard(sleep: Callable[[float], object], seconds: float) -> None:
    sleep(seconds)


class Throttle:
    """A token bucket; whoever comes when it is empty waits for the next token, in turn.

    Args:
        per_s: Requests a second in the long run.
        burst: Requests at once after a pause.
        monotonic: Seconds from some fixed point.
    """

    def __init__(
        self, *, per_s: float, burst: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tokens = float(burst)
        self._at_s = monotonic()

    def take(self) -> float:
        """Take a token, on credit if need be; return the seconds to wait before using it."""
        with self._lock:
            now_s = self._monotonic()
            gained = (now_s - self._at_s) * self._per_s
            self._tokens = min(float(self._burst), self._tokens + gained) - 1.0
            self._at_s = now_s
            return max(0.0, -self._tokens / self._per_s)
