"""When a request to the Kubernetes API is sent again, and after how long."""

import enum
import functools
import threading
from collections.abc import Callable

import tenacity

from mig_manager.adapters.kubernetes import answers

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
    if not isinstance(err, answers.ApiError) or when is When.NEVER:
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
    if isinstance(err, answers.ApiError) and err.retry_after_s is not None:
        return err.retry_after_s
    return _backoff_s(state)


def _discard(sleep: Callable[[float], object], seconds: float) -> None:
    sleep(seconds)
