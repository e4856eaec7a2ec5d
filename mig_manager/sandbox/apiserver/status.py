"""Failures of the API as the ``Status`` objects that clients know.

Reasons, codes and the wording that clients match on follow the Kubernetes API conventions
(``sig-architecture/api-conventions.md``, "Response Status Kind") and the real server's answers.
"""

import dataclasses
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object, or any JSON object, as plain Python data."""

_REASONS = {
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
    """An answer that is not a success."""

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
        self.reason = _REASONS.get(code, "") if reason is None else reason
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_status(self) -> Object:
        """Return the ``v1.Status`` object that is the answer's body."""
        status = _status("Failure") | {"message": self.message}
        if self.reason:
            status["reason"] = self.reason
        retry = {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s else {}
        if details := self.details | retry:
            status["details"] = details
        return status | {"code": self.code}


def success(**details: str) -> Object:
    """Return the Status of an action that has no object of its own to answer with."""
    return _status("Success") | ({"details": details} if details else {})


def bad_request(message: str) -> ApiError:
    """Return 400."""
    return ApiError(400, message)


def not_found(group: str, plural: str, name: str) -> ApiError:
    """Return 404 for a missing object."""
    message = f'{qualified(group, plural)} "{name}" not found'
    return ApiError(404, message, details=_details(group, plural, name))


def no_such_path() -> ApiError:
    """Return 404 for a path that no resource serves."""
    return ApiError(404, "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """Return 409 for the creation of an existing name."""
    message = f'{qualified(group, plural)} "{name}" already exists'
    details = _details(group, plural, name)
    return ApiError(409, message, reason="AlreadyExists", details=details)


def conflict(group: str, plural: str, name: str, *, because: str) -> ApiError:
    """Return 409 for a write whose precondition does not hold."""
    message = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {because}'
    return ApiError(409, message, details=_details(group, plural, name))


def expired(message: str) -> ApiError:
    """Return 410 for a version older than the history."""
    return ApiError(410, message)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiError:
    """Return 422 for an object that breaks a rule; each cause names its field."""
    lines = [f"{cause.field}: {cause.message}" for cause in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = _details(group, kind, name) | {"causes": [cause.to_json() for cause in causes]}
    return ApiError(422, f'{qualified(group, kind)} "{name}" is invalid: {text}', details=details)


def qualified(group: str, word: str) -> str:
    """Return ``plural.group``, or the word alone for the core group."""
    return f"{word}.{group}" if group else word


def _status(outcome: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": outcome}


def _details(group: str, kind: str, name: str) -> Object:
    details: Object = {"name": name} if name else {}
    return details | ({"group": group} if group else {}) | {"kind": kind}
