"""Hear at once of MIG changes that others make, where the driver tells.

A child process holds the NVML session, for the reasons of ``gpu_child``, and because an open
session can hold off a reset: ``GpuEvents.suspended`` ends it while we change the GPUs ourselves.
What is missed between two listeners is left to the agent's slow look at the GPUs.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_news, gpu_process, gpu_talker
from mig_manager.core import timing

_log = structlog.get_logger()

_LONGEST_BURST_S = 5.0
_STEADY_S = 30.0
"""A listener that lasted this long was well, and is replaced without a long pause."""
_END_S = 5.0
"""How long to wait for the end of a listener; one that hangs in the kernel is left behind."""


def listener_command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
) -> tuple[str, ...]:
    """Return the command line of ``gpu_listener``; see ``gpu_process.command``."""
    command = gpu_process.command(
        "mig_manager.adapters.nvml_worker.gpu_listener",
        library_path=library_path,
        driver_roots=driver_roots,
        simulate_state=simulate_state,
    )
    return tuple(command)


class GpuEvents:
    """Calls back when somebody else has changed MIG on a GPU of this node.

    A listener that dies is replaced, after a pause that grows. A driver that does not tell is
    asked again after the next suspension, when MIG may be on, and by the next ``start``.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        on_change: Callable[[], None],
        quiet_s: float = 0.5,
        first_word_s: float = 60.0,
        restarts: timing.Backoff | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to listen; nothing is started yet.

        Args:
            command: Starts a listener.
            on_change: Called once for each burst of changes, and once after a listener was
                replaced, since nobody heard what was changed meanwhile. In a thread of ours: it
                must neither block nor call us.
            quiet_s: How long nothing must happen for a burst to be over.
            first_word_s: How long a new listener may take until it listens, or is killed.
            restarts: How long to wait before listeners that died are replaced.
            monotonic: Seconds from some fixed point.
        """
        self._command = tuple(command)
        self._on_change = on_change
        self._quiet_s = quiet_s
        self._first_word_s = first_word_s
        self._restarts = restarts or timing.Backoff(first_s=1.0, max_s=300.0, factor=2.0)
        self._monotonic = monotonic
        # Guards what follows; notified whenever any of it changes.
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._holds = 0
        self._turn = 0
        self._is_busy = False
        self._talker: gpu_talker.Talker | None = None
        self._left_behind: list[gpu_talker.Talker] = []

    def start(self) -> None:
        """Begin to listen; the first listener needs a moment, and this does not wait for it."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the listener and our thread within seconds; done when nothing was started."""
        with self._state:
            self._is_stopping = True
            self._interrupt()
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Have no listener, and call back for nothing, during the body.

        What happens in it is ours, and who suspends looks at the GPUs himself: news that were
        about to be told are dropped. May be nested, and used from any thread.
        """
        with self._state:
            self._holds += 1
            self._interrupt()
            self._state.wait_for(lambda: not self._is_busy, timeout=_END_S)
        try:
            yield
        finally:
            with self._state:
                self._holds -= 1
                self._state.notify_all()

    def _interrupt(self) -> None:
        """End the present listener and every pause of our thread; the lock is held."""
        self._turn += 1
        if self._talker is not None:
            self._talker.kill()
        self._state.notify_all()

    def _run(self) -> None:
        trouble = _Trouble(self._restarts)
        while (turn := self._next_turn()) is not None:
            hearing = _Hearing(
                timing.Burst(quiet_s=self._quiet_s, longest_s=_LONGEST_BURST_S),
                mute_at=self._monotonic() + self._first_word_s,
                has_gap=trouble.has_gap,
            )
            failure = self._attempt(hearing, turn)
            with self._state:
                self._is_busy = False
                self._state.notify_all()
            if self._is_over(turn):
                trouble.end()
            else:
                delay_s = trouble.delay_s(failure, lasted_s=hearing.lasted_s(self._monotonic()))
                self._pause(turn, delay_s)

    def _next_turn(self) -> int | None:
        """Wait until a listener is wanted; None when we are to end."""
        with self._state:
            self._state.wait_for(lambda: self._is_stopping or not self._holds)
            if self._is_stopping:
                return None
            self._is_busy = True
            return self._turn

    def _is_over(self, turn: int) -> bool:
        with self._state:
            return self._turn != turn

    def _pause(self, turn: int, delay_s: float | None) -> None:
        """Wait; None: for the end of the turn, which otherwise cuts the pause short."""
        with self._state:
            self._state.wait_for(lambda: self._turn != turn, timeout=delay_s)

    def _attempt(self, hearing: "_Hearing", turn: int) -> gpu_news.Failed:
        """Run one listener to its end; return why it ended."""
        try:
            return self._listen(hearing, turn)
        except errors.HardwareError as error:
            return gpu_news.Failed(reason=error.reason, message=error.message)
        except Exception as error:  # noqa: BLE001 - a bug, also in on_change, must not deafen us
            _log.exception("gpu_events_error")
            return gpu_news.Failed(reason=errors.Reason.INTERNAL, message=repr(error))

    def _listen(self, hearing: "_Hearing", turn: int) -> gpu_news.Failed:
        self._left_behind = [talker for talker in self._left_behind if not talker.is_gone]
        if self._left_behind:
            # Else a driver that hangs would fill the node with processes that cannot be killed.
            return self._left_behind[0].epitaph()
        talker = gpu_talker.Talker(self._command)
        with self._state:
            self._talker = talker
            if self._turn != turn:
                talker.kill()
        failure = None
        try:
            failure = self._hear(talker, hearing, turn)
        finally:
            with self._state:
                self._talker = None
            if not talker.close():
                self._left_behind.append(talker)
        return failure or talker.epitaph()

    def _hear(
        self, talker: gpu_talker.Talker, hearing: "_Hearing", turn: int
    ) -> gpu_news.Failed | None:
        """Pass on what a listener says; return why it is no good, or None when it has ended."""
        while (heard := talker.hear(hearing.patience_s(self._monotonic()))) is not None:
            now = self._monotonic()
            for news in heard:
                match news:
                    case gpu_news.Failed():
                        return news
                    case gpu_news.Watching():
                        hearing.begin(now)
                        _log.info("gpu_events_watched", gpus=news.gpus, of=news.of)
                    case gpu_news.Changed():
                        hearing.note(now)
                        _log.info("gpu_change_heard", gpus=list(news.gpus))
            if hearing.is_mute(now):
                return gpu_news.Failed(
                    reason=errors.Reason.NVML_TIMEOUT,
                    message=f"the GPU listener was not ready within {self._first_word_s:g} s",
                )
            if hearing.is_due(now) and not self._is_over(turn):
                self._on_change()
        return None


class _Hearing:
    """What has been heard of one listener."""

    def __init__(self, changes: timing.Burst, *, mute_at: float, has_gap: bool) -> None:
        self._changes = changes
        self._mute_at = mute_at
        self._has_gap = has_gap
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """It listens; a gap before that may have hidden a change."""
        self._since = now
        if self._has_gap:
            self._changes.add(now)

    def note(self, now: float) -> None:
        """It has heard a change."""
        self._changes.add(now)

    def patience_s(self, now: float) -> float | None:
        """Return how long it may be silent before something is due; None: for ever."""
        if self._since is None:
            return max(0.0, self._mute_at - now)
        return self._changes.ends_in_s(now)

    def is_mute(self, now: float) -> bool:
        """Tell whether it should have begun to listen by now."""
        return self._since is None and now >= self._mute_at

    def is_due(self, now: float) -> bool:
        """Tell whether a burst of changes is over; told once."""
        is_over = self._changes.ends_in_s(now) == 0
        if is_over:
            self._changes.clear()
        return is_over

    def lasted_s(self, now: float) -> float:
        """Return how long it has listened."""
        return 0.0 if self._since is None else now - self._since


class _Trouble:
    """Listeners that ended by themselves, one after the other."""

    def __init__(self, restarts: timing.Backoff) -> None:
        self._restarts = restarts
        self._failures = 0
        self._told: str | None = None
        self._is_deaf_told = False
        self.has_gap = False

    def end(self) -> None:
        """We have ended a listener ourselves; who had us do so looks at the GPUs."""
        self._failures = 0
        self.has_gap = False

    def delay_s(self, failure: gpu_news.Failed, *, lasted_s: float) -> float | None:
        """Tell what went wrong and return the pause before the next try; None: none is due."""
        if failure.reason is errors.Reason.NOT_SUPPORTED:
            if not self._is_deaf_told:
                _log.warning("gpu_events_unsupported", error=failure.message)
            self._is_deaf_told = True
            return None
        if lasted_s >= _STEADY_S:
            self._failures = 0
        delay_s = self._restarts.delay_s(self._failures)
        self._failures += 1
        self.has_gap = True
        # A driver that is away for hours is told once; what had listened is told each time.
        if lasted_s > 0 or failure.message != self._told:
            _log.warning(
                "gpu_listener_ended",
                reason=failure.reason.value,
                error=failure.message,
                delay_s=delay_s,
            )
        self._told = failure.message
        return delay_s
