"""Kubelet's PodResources through a worker process, so that the agent at rest has no gRPC in it.

gRPC with protobuf is a third of the agent's memory, and once loaded never leaves a process again.
The worker answers any number of questions and ends when none has come for a while.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.kubelet import pod_resources
from mig_manager.core import ports
from mig_manager.core.node import cluster

_LINGER_S = 15.0
"""Longer than the pauses between two questions of one run."""
_START_S = 30.0
"""How long a start may take on a busy machine."""
_END_S = 2.0


def worker_command(
    socket_path: str, *, timeout_s: float = 10.0, linger_s: float = _LINGER_S
) -> tuple[str, ...]:
    """Return the command line of the worker, which ends ``linger_s`` after the last question."""
    module = "mig_manager.adapters.kubelet.pod_resources"
    return subprocesses.python(module, socket_path, str(timeout_s), str(linger_s))


class WorkerPodResources(ports.Standby):
    """Implements ``ports.DeviceAllocations``; for one thread at a time.

    As ``ports.Standby`` it starts the worker ahead, which imports what it needs and waits.
    """

    def __init__(
        self, socket_path: str, *, timeout_s: float = 10.0, command: Sequence[str] | None = None
    ) -> None:
        self._socket = pod_resources.PodResources(socket_path, timeout_s=timeout_s)
        self._command = command or worker_command(socket_path, timeout_s=timeout_s)
        # A question that is repeated takes up to twice as long.
        self._timeout_s = _START_S + 2 * timeout_s
        self._worker: _Worker | None = None

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod has which devices; see ``pod_resources.PodResources``."""
        pods: tuple[cluster.PodDevices, ...] = self._ask("assigned")
        return pods

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource; see ``pod_resources.PodResources``."""
        devices: Mapping[str, frozenset[str]] = self._ask("allocatable")
        return devices

    def prepare(self) -> None:
        """Start the worker; a failure shows when the worker is needed."""
        if self._worker is None or self._worker.is_over:
            with contextlib.suppress(errors.ClusterError, OSError, RuntimeError):
                self._socket.check()
                self._worker = _Worker(self._command)

    def dismiss(self) -> None:
        """End the worker, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _ask(self, question: str) -> Any:
        # Checked here: on a node whose socket we may not see, a worker would be for nothing.
        self._socket.check()
        worker, self._worker = self._worker, None
        try:
            outcome = None
            if worker is not None:
                # It may just have ended by itself: only a new worker's end is a failure.
                with contextlib.suppress(EOFError):
                    outcome = self._asked(worker, question)
            outcome = outcome or self._asked(_Worker(self._command), question)
        except (EOFError, OSError, RuntimeError, ValueError) as error:
            raise self._socket.unavailable(f"the process that asks it: {error}") from error
        return subprocesses.result(outcome)

    def _asked(self, worker: "_Worker", question: str) -> Any:
        try:
            outcome = worker.ask(question, self._timeout_s)
        except BaseException:
            worker.end()
            raise
        self._worker = worker
        return outcome


class _Worker:
    """A running worker, reaped as soon as it ends, also when no question follows."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        Raises:
            OSError: It cannot be started.
            RuntimeError: No thread is left.
        """
        self._lock = threading.Lock()
        self.is_over = False
        """Whether it has ended and everything is released."""
        self._child = subprocesses.Child(command)
        self._reaper = threading.Thread(target=self._reap, name="kubelet-worker", daemon=True)
        try:
            self._reaper.start()
        except BaseException:
            self._child.end()
            raise

    def ask(self, question: str, timeout_s: float) -> Any:
        """Return the outcome of a question.

        Raises:
            EOFError: It has ended; with the last of its stderr.
            OSError: It gave no answer in time.
            ValueError: What it sent is no message.
        """
        with self._lock:
            if self.is_over:
                raise EOFError("has ended")
            try:
                return self._child.ask(question, timeout_s=timeout_s)
            except EOFError as error:
                stderr = self._child.stderr.text().strip()
                raise EOFError(f"ended: {stderr or 'without a message'}") from error

    def end(self) -> None:
        """Kill it."""
        self._child.kill()
        self._reaper.join(_END_S)

    def _reap(self) -> None:
        self._child.wait()
        with self._lock:
            self._child.end()
            self.is_over = True
