"""The failures of the embedded Kubernetes API, as the ``Status`` objects that clients know.

Reasons, codes and the wording that clients match on follow the Kubernetes API conventions
(``sig-architecture/api-conventions.md``, "Response Status Kind") and the real server's answers.
"""

import dataclasses
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object, or any JSON object, as plain Python data."""

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One entry of ``details.causes``."""

    reason: str
    message: str
    field: str = ""

    def to_json(self) -> Object:
        """Return the cause as the API writes it; an empty field is left out."""
        cause = {"reason": self.reason, "message": self.message}
        return cause | ({"field": self.field} if self.field else {})


class ApiError(Exception):
    """An answer that is not a success.

    Attributes:
        code: HTTP status.
        reason: The machine-readable ``reason`` of the Status.
        retry_after_s: Seconds the client is asked to wait, or None.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: Object | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = REASONS.get(code, "") if reason is None else reason
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_status(self) -> Object:
        """Return the ``v1.Status`` object that is the answer's body."""
        status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        details = dict(self.details)
        if self.retry_after_s:
            details["retryAfterSeconds"] = self.retry_after_s
        if details:
            status["details"] = details
        return status | {"code": self.code}


def success(**details: str) -> Object:
    """Return the Status that says an action without an object of its own has been done."""
    status: Object = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
    }
    return status | ({"details": details} if details else {})


def bad_request(message: str) -> ApiError:
    """Return 400: the request does not make sense, whatever the state."""
    return ApiError(400, message)


def not_found(group: str, plural: str, name: str) -> ApiError:
    """Return 404 for an object that is not there."""
    return ApiError(
        404, f'{qualified(group, plural)} "{name}" not found', details=_of(group, plural, name)
    )


def no_such_path() -> ApiError:
    """Return 404 for a path that no resource serves."""
    return ApiError(404, "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """Return 409 for a create of a name that is taken."""
    return ApiError(
        409,
        f'{qualified(group, plural)} "{name}" already exists',
        reason="AlreadyExists",
        details=_of(group, plural, name),
    )


def conflict(group: str, plural: str, name: str, *, because: str) -> ApiError:
    """Return 409 for a write whose precondition does not hold."""
    return ApiError(
        409,
        f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {because}',
        details=_of(group, plural, name),
    )


def expired(message: str) -> ApiError:
    """Return 410: the resourceVersion or continue token is older than the history kept."""
    return ApiError(410, message)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiError:
    """Return 422 for an object that breaks a rule; each cause names its field."""
    told = [f"{cause.field}: {cause.message}" for cause in causes]
    text = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    details = _of(group, kind, name) | {"causes": [cause.to_json() for cause in causes]}
    return ApiError(422, f'{qualified(group, kind)} "{name}" is invalid: {text}', details=details)


def qualified(group: str, word: str) -> str:
    """Return ``plural.group``, or the word alone for the core group."""
    return f"{word}.{group}" if group else word


def _of(group: str, kind: str, name: str) -> Object:
    details: Object = {"name": name} if name else {}
    if group:
        details["group"] = group
    return details | {"kind": kind}
