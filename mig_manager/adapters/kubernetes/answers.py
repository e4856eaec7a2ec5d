"""What the Kubernetes API said, as values and errors of ours.

The one place that knows the ``Status`` object (``metav1.Status``, the body of every refusal) and
which HTTP status is worth which reason.
"""

import http
import json
import math
from collections.abc import Mapping
from typing import Any

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
