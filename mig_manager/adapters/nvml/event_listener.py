"""Report MIG changes by other programs and critical errors at once, as the driver's events.

A child process holds the NVML session, for the reasons of ``worker_client``. An open session can
also prevent a reset, so ``GpuEvents.suspended`` ends it while we change the GPUs ourselves. The
agent's slow drift check detects changes between two listeners.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import subprocesses
from mig_manager.core import timing

_log = structlog.get_logger()

_MAX_BURST_S = 5.0
_RESTARTS = timing.Backoff(first_s=1.0, max_s=300.0, factor=2.0)
_STEADY_S = 30.0
"""A listener that lived this long was healthy, and is replaced after a short pause."""
_END_S = 5.0  # how long to wait for the end of a listener, which may hang in the kernel


@dataclasses.dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class GpuEvents:
    """Calls back when another program has changed MIG on a GPU of this node, or a GPU had an Xid.

    A listener that dies is replaced, with a backoff. On a driver without MIG events the next
    listener starts after a suspension, when MIG may be on, or at the next ``start``.
    """

    command: Sequence[str]
    on_change: Callable[[], None]
    """Called after each burst of changes, and after the replacement of a listener, which may have
    missed changes. In a thread of ours: it must neither block nor call us."""
    on_xids: Callable[[Sequence[tuple[str, int]]], object] = lambda _: None
    """Called before ``on_change``, and like it, with the UUID and number of each critical
    error."""
    quiet_s: float = 0.5  # a burst of changes ends after this time without a change
    start_timeout_s: float = 60.0  # a listener that is not ready within this time is killed
    restarts: timing.Backoff = _RESTARTS  # for the replacement of listeners that died
    # Guards the fields below; notified when any of them changes.
    _state: threading.Condition = dataclasses.field(
        default_factory=threading.Condition, init=False
    )
    _thread: threading.Thread | None = dataclasses.field(default=None, init=False)
    _is_stopping: bool = dataclasses.field(default=False, init=False)
    _suspensions: int = dataclasses.field(default=0, init=False)
    _generation: int = dataclasses.field(default=0, init=False)
    _is_busy: bool = dataclasses.field(default=False, init=False)
    _child: subprocesses.Child | None = dataclasses.field(default=None, init=False)
    # Of our thread alone: the present listener, and earlier ones that ended by themselves.
    _listening_since_s: float | None = dataclasses.field(default=None, init=False)
    _failures: int = dataclasses.field(default=0, init=False)
    """Listeners that failed one after the other; after one, changes may have been missed."""
    _logged_failure: str | None = dataclasses.field(default=None, init=False)
    _has_logged_unsupported: bool = dataclasses.field(default=False, init=False)
    _left_behind: list[subprocesses.Child] = dataclasses.field(default_factory=list, init=False)

    def start(self) -> None:
        """Begin to listen, without waiting until the first listener is ready."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the listener and our thread within seconds."""
        with self._state:
            self._is_stopping = True
            self._interrupt()
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the listener and all call backs during the body; nests, for any thread."""
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
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_stopping or not self._suspensions)
                if self._is_stopping:
                    return
                self._is_busy = True
                generation = self._generation
            self._listening_since_s = None
            try:
                failure = self._listen(generation)
            except Exception as error:  # noqa: BLE001 - a bug, also in on_change, must not end listening
                _log.exception("gpu_events_error")
                failure = _failure(repr(error))
            if self._is_interrupted(generation):
                # The caller then observes the GPUs.
                self._failures = 0
                delay_s: float | None = 0.0
            else:
                delay_s = self._delay_s(failure)
            with self._state:
                self._is_busy = False
                self._state.notify_all()
                self._state.wait_for(functools.partial(self._is_interrupted, generation), delay_s)

    def _is_interrupted(self, generation: int) -> bool:
        """Return whether we ended a listener ourselves."""
        return self._generation != generation

    def _listen(self, generation: int) -> errors.HardwareError:
        """Run one listener to its end; return why it ended."""
        self._left_behind = [child for child in self._left_behind if child.status is None]
        if self._left_behind:
            # A driver that hangs would fill the node with processes that cannot be killed.
            return _ending_error(self._left_behind[0])
        try:
            child = subprocesses.Child(self.command)
        except OSError as error:
            return _failure(f"the GPU listener cannot be started: {error}")
        with self._state:
            self._child = child
            if self._is_interrupted(generation):
                child.kill()
        try:
            failure = self._receive(child, generation)
        finally:
            with self._state:
                self._child = None
            if not child.end():
                _log.error("gpu_listener_unkillable", pid=child.pid)
                self._left_behind.append(child)
            stderr = child.stderr.text().strip()
            if stderr:
                _log.warning("gpu_listener_stderr", stderr=stderr)
        return failure or _ending_error(child)

    def _receive(self, child: subprocesses.Child, generation: int) -> errors.HardwareError | None:
        """Handle the messages of a listener; return why it failed, None if it has ended."""
        burst = timing.Burst(quiet_s=self.quiet_s, max_s=_MAX_BURST_S)
        start_by_s = time.monotonic() + self.start_timeout_s
        while True:
            now_s = time.monotonic()
            is_listening = self._listening_since_s is not None
            timeout_s = burst.ends_in_s(now_s) if is_listening else max(0.0, start_by_s - now_s)
            try:
                with contextlib.suppress(TimeoutError):
                    self._handle(child.receive(timeout_s), burst)
            except EOFError:
                return None
            except ValueError as error:
                return _failure(f"the GPU listener sent an invalid message: {error}")
            except errors.HardwareError as error:
                return error
            now_s = time.monotonic()
            if self._listening_since_s is None and now_s >= start_by_s:
                return errors.HardwareError(
                    f"the GPU listener was not ready within {self.start_timeout_s:g} s",
                    reason=reasons.Reason.NVML_TIMEOUT,
                )
            if burst.ends_in_s(now_s) == 0:
                burst.clear()
                if not self._is_interrupted(generation):
                    self.on_change()

    def _handle(self, message: object, burst: timing.Burst) -> None:
        now_s = time.monotonic()
        match message:
            case ("watching", int(gpus), int(of)):
                _log.info("gpu_events_watched", gpus=gpus, of=of)
                self._listening_since_s = now_s
                if self._failures:
                    burst.add(now_s)
            case ("events", tuple(changed), tuple(xids)):
                if changed:
                    _log.info("gpu_change_heard", gpus=list(changed))
                for uuid, xid in xids:
                    _log.warning("gpu_xid", gpu=uuid, xid=xid)
                if xids:
                    self.on_xids(xids)
                burst.add(now_s)
            case ("failed", reason, str(why)):
                raise errors.HardwareError(why, reason=reasons.Reason(reason))
            case _:
                raise ValueError(repr(message))

    def _delay_s(self, failure: errors.HardwareError) -> float | None:
        """Log a failure and return the pause before the next listener; None: start none."""
        if failure.reason is reasons.Reason.NOT_SUPPORTED:
            if not self._has_logged_unsupported:
                _log.warning("gpu_events_unsupported", error=failure.message)
            self._has_logged_unsupported = True
            return None
        since_s = self._listening_since_s
        lasted_s = 0.0 if since_s is None else time.monotonic() - since_s
        if lasted_s >= _STEADY_S:
            self._failures = 0
        delay_s = self.restarts.delay_s(self._failures)
        self._failures += 1
        # Log a driver that is away for hours once, and the end of a working listener each time.
        if lasted_s > 0 or failure.message != self._logged_failure:
            _log.warning(
                "gpu_listener_ended",
                reason=failure.reason.value,
                error=failure.message,
                delay_s=delay_s,
            )
        self._logged_failure = failure.message
        return delay_s


def _ending_error(child: subprocesses.Child) -> errors.HardwareError:
    status = child.status
    reason = reasons.Reason.INTERNAL
    if status is None:
        reason = reasons.Reason.NVML_TIMEOUT
    elif status < 0:
        reason = reasons.Reason.NVML_ERROR
    return errors.HardwareError(f"the GPU listener {subprocesses.ending(status)}", reason=reason)


def _failure(message: str) -> errors.HardwareError:
    return errors.HardwareError(message, reason=reasons.Reason.INTERNAL)
