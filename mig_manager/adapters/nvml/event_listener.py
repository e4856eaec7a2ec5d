"""Report MIG changes by other programs at once, if the driver has events for them.

A child process holds the NVML session, for the reasons of ``client``, and because an open session
can prevent a reset: ``GpuEvents.suspended`` ends it while we change the GPUs ourselves. Changes
between two listeners are found by the agent's slow drift check.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.core import timing

_log = structlog.get_logger()

_LONGEST_BURST_S = 5.0
_STEADY_S = 30.0
"""A listener that lived this long was healthy, and is replaced after a short pause."""
_END_S = 5.0
"""How long to wait for the end of a listener; one that hangs in the kernel is left behind."""


class GpuEvents:
    """Calls back when another program has changed MIG on a GPU of this node.

    A listener that dies is replaced, with a backoff. A driver without MIG events is asked again
    after the next suspension, when MIG may be on, and by the next ``start``.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        on_change: Callable[[], None],
        quiet_s: float = 0.5,
        start_timeout_s: float = 60.0,
        restarts: timing.Backoff | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to listen; nothing is started yet.

        Args:
            command: Starts a listener.
            on_change: Called once for each burst of changes, and once after a listener was
                replaced, since changes may have been missed. In a thread of ours: it must neither
                block nor call us.
            quiet_s: How long nothing must happen for a burst to be over.
            start_timeout_s: How long a new listener may take until it listens, or is killed.
            restarts: Backoff for the replacement of listeners that died.
            monotonic: Seconds from some fixed point.
        """
        self._command = tuple(command)
        self._on_change = on_change
        self._quiet_s = quiet_s
        self._start_timeout_s = start_timeout_s
        self._restarts = restarts or timing.Backoff(first_s=1.0, max_s=300.0, factor=2.0)
        self._monotonic = monotonic
        # Guards the fields below; notified when any of them changes.
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._suspensions = 0
        self._generation = 0
        self._is_busy = False
        self._child: subprocesses.Child | None = None
        self._left_behind: list[subprocesses.Child] = []

    def start(self) -> None:
        """Begin to listen, without waiting until the first listener is ready."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the listener and our thread within seconds, if there are any."""
        with self._state:
            self._is_stopping = True
            self._interrupt()
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Have no listener and no call back during the body, for changes of our own.

        May be nested, and used from any thread.
        """
        with self._state:
            self._suspensions += 1
            self._interrupt()
            self._state.wait_for(lambda: not self._is_busy, timeout=_END_S)
        try:
            yield
        finally:
            with self._state:
                self._suspensions -= 1
                self._state.notify_all()

    def _interrupt(self) -> None:
        """End the present listener and every pause of our thread; the lock is held."""
        self._generation += 1
        if self._child is not None:
            self._child.kill()
        self._state.notify_all()

    def _run(self) -> None:
        failures = _Failures(self._restarts)
        while (generation := self._next_generation()) is not None:
            burst = timing.Burst(quiet_s=self._quiet_s, longest_s=_LONGEST_BURST_S)
            listener = _Listener(
                burst,
                start_by=self._monotonic() + self._start_timeout_s,
                missed_changes=failures.missed_changes,
            )
            failure = self._attempt(listener, generation)
            with self._state:
                self._is_busy = False
                self._state.notify_all()
                is_interrupted = self._generation != generation
            if is_interrupted:
                failures.clear()
                continue
            delay_s = failures.delay_s(failure, lasted_s=listener.lasted_s(self._monotonic()))
            with self._state:
                self._state.wait_for(lambda: self._generation != generation, timeout=delay_s)

    def _next_generation(self) -> int | None:
        """Wait until no suspension is left; None when we are to end."""
        with self._state:
            self._state.wait_for(lambda: self._is_stopping or not self._suspensions)
            if self._is_stopping:
                return None
            self._is_busy = True
            return self._generation

    def _attempt(self, listener: "_Listener", generation: int) -> errors.HardwareError:
        """Run one listener to its end; return why it ended."""
        try:
            return self._listen(listener, generation)
        except errors.HardwareError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a bug, also in on_change, must not end listening
            _log.exception("gpu_events_error")
            return _failed(repr(error))

    def _listen(self, listener: "_Listener", generation: int) -> errors.HardwareError:
        self._left_behind = [child for child in self._left_behind if child.status is None]
        if self._left_behind:
            # A driver that hangs would fill the node with processes that cannot be killed.
            return _ended(self._left_behind[0])
        try:
            child = subprocesses.Child(self._command)
        except OSError as error:
            return _failed(f"the GPU listener cannot be started: {error}")
        with self._state:
            self._child = child
            if self._generation != generation:
                child.kill()
        try:
            failure = self._receive(child, listener, generation)
        finally:
            with self._state:
                self._child = None
            if not child.end():
                _log.error("gpu_listener_unkillable", pid=child.pid)
                self._left_behind.append(child)
            stderr = child.stderr.text().strip()
            if stderr:
                _log.warning("gpu_listener_stderr", stderr=stderr)
        return failure or _ended(child)

    def _receive(
        self, child: subprocesses.Child, listener: "_Listener", generation: int
    ) -> errors.HardwareError | None:
        """Handle the messages of a listener; return why it failed, None if it has ended."""
        while True:
            timeout_s = listener.timeout_s(self._monotonic())
            try:
                with contextlib.suppress(TimeoutError):
                    listener.handle(child.receive(timeout_s), self._monotonic())
            except EOFError:
                return None
            except ValueError as error:
                return _failed(f"the GPU listener sent an invalid message: {error}")
            now = self._monotonic()
            if listener.is_late(now):
                return errors.HardwareError(
                    f"the GPU listener was not ready within {self._start_timeout_s:g} s",
                    reason=errors.Reason.NVML_TIMEOUT,
                )
            if listener.take_burst(now) and self._generation == generation:
                self._on_change()


class _Listener:
    """The state of one listener."""

    def __init__(self, burst: timing.Burst, *, start_by: float, missed_changes: bool) -> None:
        self._burst = burst
        self._start_by = start_by
        self._missed_changes = missed_changes
        self._since: float | None = None

    def handle(self, message: object, now: float) -> None:
        """Note what it reports.

        Raises:
            HardwareError: It cannot listen.
            ValueError: The message is unknown.
        """
        match message:
            case ("watching", int(gpus), int(of)):
                _log.info("gpu_events_watched", gpus=gpus, of=of)
                self._since = now
                if self._missed_changes:
                    self._burst.add(now)
            case ("changed", tuple(gpus)):
                _log.info("gpu_change_heard", gpus=list(gpus))
                self._burst.add(now)
            case ("failed", reason, str(why)):
                raise errors.HardwareError(why, reason=errors.Reason(reason))
            case _:
                raise ValueError(repr(message))

    def timeout_s(self, now: float) -> float | None:
        """Return how long to wait for its next message; None: without limit."""
        if self._since is None:
            return max(0.0, self._start_by - now)
        return self._burst.ends_in_s(now)

    def is_late(self, now: float) -> bool:
        """Return whether it does not listen yet, but should."""
        return self._since is None and now >= self._start_by

    def take_burst(self, now: float) -> bool:
        """Return whether a burst of changes is over, once for each burst."""
        is_over = self._burst.ends_in_s(now) == 0
        if is_over:
            self._burst.clear()
        return is_over

    def lasted_s(self, now: float) -> float:
        """Return how long it has listened."""
        return 0.0 if self._since is None else now - self._since


class _Failures:
    """Listeners that ended by themselves, one after the other."""

    def __init__(self, restarts: timing.Backoff) -> None:
        self._restarts = restarts
        self._count = 0
        self._logged: str | None = None
        self._has_logged_unsupported = False
        self.missed_changes = False

    def clear(self) -> None:
        """Forget them: we ended a listener ourselves, and the caller then observes the GPUs."""
        self._count = 0
        self.missed_changes = False

    def delay_s(self, failure: errors.HardwareError, *, lasted_s: float) -> float | None:
        """Log a failure and return the pause before the next listener; None: start none."""
        if failure.reason is errors.Reason.NOT_SUPPORTED:
            if not self._has_logged_unsupported:
                _log.warning("gpu_events_unsupported", error=failure.message)
            self._has_logged_unsupported = True
            return None
        if lasted_s >= _STEADY_S:
            self._count = 0
        delay_s = self._restarts.delay_s(self._count)
        self._count += 1
        self.missed_changes = True
        # A driver that is away for hours is logged once; a listener that worked, each time.
        if lasted_s > 0 or failure.message != self._logged:
            _log.warning(
                "gpu_listener_ended",
                reason=failure.reason.value,
                error=failure.message,
                delay_s=delay_s,
            )
        self._logged = failure.message
        return delay_s


def _ended(child: subprocesses.Child) -> errors.HardwareError:
    status = child.status
    reason = errors.Reason.INTERNAL
    if status is None:
        reason = errors.Reason.NVML_TIMEOUT
    elif status < 0:
        reason = errors.Reason.NVML_ERROR
    return errors.HardwareError(f"the GPU listener {subprocesses.ending(status)}", reason=reason)


def _failed(message: str) -> errors.HardwareError:
    return errors.HardwareError(message, reason=errors.Reason.INTERNAL)
