"""Wait for one's turn on this node's GPUs, for as long as somebody is willing to wait."""

import contextlib
from collections.abc import Callable, Iterator

from mig_manager import errors
from mig_manager.core import ports, timing

_PACE = timing.Backoff()


@contextlib.contextmanager
def held(  # noqa: PLR0913 - each is named where it is called
    exclusion: ports.NodeLock,
    doing: str,
    *,
    clock: timing.Clock,
    wait: Callable[[float], object],
    timeout_s: float,
    pace: timing.Backoff = _PACE,
    on_wait: Callable[[errors.LockedError], object] = lambda _error: None,
) -> Iterator[None]:
    """Keep every other manager off while the context lasts, once it is our turn.

    Args:
        exclusion: What keeps the others off.
        doing: What for, told to whoever is kept off.
        clock: Measures the wait.
        wait: Sleeps for seconds; what it raises ends the wait.
        timeout_s: How long to try; 0: once.
        pace: How often to try.
        on_wait: Called once, before the first pause, with what is in the way.

    Raises:
        LockedError: On entering: another manager was still at work at the end of the time; the
            message says which, and how long was waited.
        UsageError: On entering: as ``hold`` of the exclusion.
    """
    with contextlib.ExitStack() as stack:
        since = clock.monotonic()
        turn = 0
        while True:
            try:
                stack.enter_context(exclusion.hold(doing))
                break
            except errors.LockedError as error:
                left_s = since + timeout_s - clock.monotonic()
                if left_s <= 0:
                    _say_how_long(error, clock.monotonic() - since, turn)
                    raise
                if turn == 0:
                    on_wait(error)
            wait(min(pace.delay_s(turn), left_s))
            turn += 1
        yield


def _say_how_long(error: errors.LockedError, seconds: float, turns: int) -> None:
    if turns:
        error.add(f"waited {seconds:.3g} s for it to finish")
