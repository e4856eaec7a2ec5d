"""Kubelet's worker of one admitted pod: starts, polls, restarts and ends its containers."""

import enum

from mig_manager.core import timing
from mig_manager.sandbox.node import device_plugin, manifests, objects

_CRASH_BACKOFF = timing.Backoff(first_s=10.0, max_s=300.0, factor=2.0)
"""The pauses before a crashed container restarts."""


class _PodState(enum.Enum):
    WAITING = enum.auto()  # for its start, or for its next start after a crash
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


class PodWorker:
    """The containers of one pod; no method waits, and times are monotonic seconds."""

    def __init__(
        self,
        program: device_plugin.PodProgram,
        *,
        start_at: float,
        stop_s: float,
        restarts: int = 0,
    ) -> None:
        """Prepare; ``stop_s`` is how long it needs to stop, unless its annotation says that."""
        self._program = program
        self._stop_s = stop_s
        self._restarts = restarts
        self._state = _PodState.WAITING
        self._ends_at: float | None = start_at
        """When the state ends."""
        self._stopping_since = 0.0

    @property
    def next_at(self) -> float | None:
        """When to call it again; None: never."""
        times = (at for at in (self._ends_at, self._program.next_at) if at is not None)
        return min(times, default=None)

    @property
    def has_stopped(self) -> bool:
        """Whether its containers have stopped for good."""
        return self._state is _PodState.STOPPED

    def advance(self, pod: objects.JsonObject, now: float) -> objects.JsonObject | None:
        """Do what is due; return the pod's new status, None if it has not changed."""
        is_due = self._ends_at is not None and now >= self._ends_at
        try:
            match self._state:
                case _PodState.RUNNING if is_due:
                    self.stop()
                    return manifests.success(pod)
                case _PodState.RUNNING:
                    self._program.poll(now)
                case _PodState.WAITING if is_due:
                    self._program.start(now)
                    run_s = objects.annotations(pod).get(objects.RUN_SECONDS)
                    self._state = _PodState.RUNNING
                    self._ends_at = None if run_s is None else now + float(run_s)
                    return manifests.running(pod, restarts=self._restarts)
                case _:
                    pass
        except device_plugin.NotStartedError as error:
            return self._back_off(pod, now, reason="RunContainerError", message=str(error))
        except device_plugin.ExitedError as error:
            return self._back_off(pod, now, reason="CrashLoopBackOff", message=str(error))
        return None

    def terminate(self, pod: objects.JsonObject, now: float) -> None:
        """Stop the containers of a terminating pod, once its time to stop has passed."""
        if self._state is _PodState.RUNNING:
            self._state, self._stopping_since = _PodState.STOPPING, now
        if self._state is _PodState.STOPPING:
            # Computed every time: a second deletion may shorten the grace period.
            grace_s = pod["metadata"]["deletionGracePeriodSeconds"]
            own_s = objects.annotations(pod).get(objects.STOP_SECONDS, self._stop_s)
            self._ends_at = self._stopping_since + min(float(own_s), float(grace_s))
            if now < self._ends_at:
                return
        self.stop()

    def stop(self) -> None:
        """Stop the containers at once."""
        self._state, self._ends_at = _PodState.STOPPED, None
        self._program.stop()

    def _back_off(
        self, pod: objects.JsonObject, now: float, *, reason: str, message: str
    ) -> objects.JsonObject:
        self._program.stop()
        self._state = _PodState.WAITING
        self._ends_at = now + _CRASH_BACKOFF.delay_s(self._restarts)
        self._restarts += 1
        return manifests.waiting(pod, reason=reason, message=message, restarts=self._restarts)
