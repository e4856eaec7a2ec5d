"""Parse the API server's answers: objects, refusals, and the events of a watch.

Only this module knows the ``Status`` object (``metav1.Status``, the body of every refusal), and
maps HTTP statuses to reasons.
"""

import contextlib
import http
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import urllib3

from mig_manager import errors, reasons
from mig_manager.core.files import json_text

_CHUNK = 1 << 16
_MAX_LINE = 8 << 20
"""Bytes; etcd refuses objects above 1.5 MiB by default, so a longer line is not an event."""


class ApiError(errors.ClusterError):
    """A failed request to the Kubernetes API."""

    def __init__(
        self,
        message: str,
        *,
        reason: reasons.Reason,
        status: int | None = None,
        retry_after_s: float | None = None,
        explanation: str = "",
    ) -> None:
        super().__init__(message, reason=reason, status=status, retry_after_s=retry_after_s)
        self.explanation = explanation
        """The server's own words, without method and path; empty if it sent none."""


def no_answer(request: str, detail: str) -> ApiError:
    """Return the error for a request without a complete response."""
    return ApiError(
        f"no answer from the Kubernetes API to {request}: {detail}",
        reason=reasons.Reason.API_UNAVAILABLE,
    )


def refusal(
    request: str, status: int, headers: Mapping[str, str], body: bytes, *, is_starting: bool
) -> ApiError:
    """Return the error for a response with an HTTP status other than 2xx.

    A server that ``is_starting`` answers 403 until it has read the cluster's roles.
    """
    try:
        document = json_text.parse(body)
    except ValueError:
        document = {}
    fields = document if isinstance(document, dict) else {}
    explanation = _explanation(fields) or body[:200].decode(errors="replace").strip()
    is_early = is_starting and status == http.HTTPStatus.FORBIDDEN
    return ApiError(
        f"the Kubernetes API answered {status} to {request}: {explanation or 'no explanation'}",
        reason=reasons.Reason.API_UNAVAILABLE if is_early else _reason(status),
        status=status,
        retry_after_s=_retry_after_s(headers, fields),
        explanation=explanation,
    )


def parse(request: str, body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; an empty body is an empty object.

    Raises:
        ApiError: The body is anything else, such as a proxy's page or a truncated response.
    """
    try:
        document = json_text.parse(body or b"{}")
        why = f"a JSON {type(document).__name__}"
    except ValueError as error:
        document, why = None, str(error)
    if isinstance(document, dict):
        return document
    raise ApiError(
        f"the Kubernetes API's answer to {request} is not a JSON object: {why}",
        reason=reasons.Reason.API_UNAVAILABLE,
    )


class WatchStream(Iterator[dict[str, Any]]):
    """The events of one watch request, as ``{"type": ..., "object": ...}``, BOOKMARKs included.

    Iteration ends when the server ends the watch, which it does at its timeout, and when another
    thread interrupts it.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, *, request: str) -> None:
        self._response = response
        self._request = request
        self._buffer = bytearray()
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        # After a partial read the connection cannot serve another request.
        self._response.close()

    def __next__(self) -> dict[str, Any]:
        """Wait for the next event.

        Raises:
            ApiError: The server sent an ERROR event (410: the resource version is too old), was
                silent for too long, broke the connection, or sent something other than events.
        """
        while (line := self._read_line()) is not None:
            if line.strip():
                return self._parse(line)
        raise StopIteration

    def interrupt(self) -> None:
        """End the watch from any thread; a blocked read returns at once."""
        self._is_interrupted = True
        # It may be closed meanwhile.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._response.shutdown()

    def _read_line(self) -> bytes | None:
        """Return the next line; None at the end of the stream."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > _MAX_LINE:
                raise no_answer(self._request, f"an event of more than {_MAX_LINE} bytes")
            try:
                # Not decoded, as in ``KubeApi``.
                chunk = self._response.read1(_CHUNK, decode_content=False)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not self._is_interrupted:
                    raise no_answer(self._request, str(error)) from error
                chunk = b""
            if not chunk:
                if self._buffer.strip() and not self._is_interrupted:
                    raise no_answer(self._request, "the stream ends in the middle of an event")
                self._buffer.clear()
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            event = json_text.parse(line)
        except ValueError as error:
            raise no_answer(self._request, f"not an event: {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise no_answer(self._request, "not an event")
        if event.get("type") != "ERROR":
            return event
        status = event["object"]
        code = status["code"] if isinstance(status.get("code"), int) else None
        explanation = _explanation(status) or "no explanation"
        raise ApiError(
            f"the Kubernetes API broke off {self._request}: {explanation}",
            reason=_reason(code) if code else reasons.Reason.API_ERROR,
            status=code,
            retry_after_s=_retry_after_s({}, status),
            explanation=explanation,
        )


_OUTAGES = frozenset({http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.TOO_MANY_REQUESTS})
"""Refusals that say nothing about the request. Refused credentials concern every request, and
are renewed by another program, while only a person grants a missing right."""


def _reason(status: int) -> reasons.Reason:
    if status in _OUTAGES or status >= 500:  # noqa: PLR2004 - 5xx
        return reasons.Reason.API_UNAVAILABLE
    if status == http.HTTPStatus.FORBIDDEN:
        return reasons.Reason.FORBIDDEN
    return reasons.Reason.API_ERROR


def _explanation(status: Mapping[str, Any]) -> str:
    """Join a Status's message and its causes; a blocked eviction names its budget only there."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    parts = [status, *(each for each in causes or () if isinstance(each, dict))]
    return " ".join(str(part["message"]) for part in parts if part.get("message"))


def _retry_after_s(headers: Mapping[str, str], status: Mapping[str, Any]) -> float | None:
    """Return the delay that the server requests; a date in the header counts as none."""
    details = status.get("details")
    value = headers.get("Retry-After") or (
        details.get("retryAfterSeconds") if isinstance(details, dict) else None
    )
    try:
        seconds = float(value or 0.0)
    except (TypeError, ValueError):
        return None
    return seconds if 0 < seconds < math.inf else None
