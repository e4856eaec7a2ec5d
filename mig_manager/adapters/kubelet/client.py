"""Ask kubelet through a child process, so that the agent at rest has no gRPC in it.

gRPC with protobuf is a third of what the agent would weigh, and once loaded never leaves a process
again. The child answers as many questions as come and ends when none has come for a while.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mig_manager import errors
from mig_manager.adapters.kubelet import pod_resources, podresources_lines
from mig_manager.core import ports
from mig_manager.core.node import cluster

_Answer = TypeVar("_Answer")

_LINGER_S = 15.0
"""Longer than the pauses between two questions of one run."""
_START_S = 30.0
"""What a start may take on a machine that is busy with other things."""
_CHUNK = 1 << 16
_STDERR_TOLD = 2000


def worker_command(
    socket_path: str, *, timeout_s: float = 10.0, linger_s: float = _LINGER_S
) -> tuple[str, ...]:
    """Return the command line of ``mig_manager.adapters.kubelet.kubelet_worker``.

    Args:
        socket_path: Of kubelet's PodResources.
        timeout_s: How long one question may take.
        linger_s: How long it waits for another question before it ends.
    """
    # -P: a module in whatever folder we were started from must not stand in for a library's.
    program = (sys.executable, "-P", "-m", "mig_manager.adapters.kubelet.kubelet_worker")
    return (*program, socket_path, str(timeout_s), str(linger_s))


class WorkerPodResources(ports.Standby):
    """Implements ``ports.DeviceAllocations``; for one thread at a time.

    As ``ports.Standby`` it starts the child ahead, which loads what it needs and then waits.

    Args:
        socket_path: For example ``/var/lib/kubelet/pod-resources/kubelet.sock``.
        timeout_s: How long one question may take.
        command: Starts the child; None: ``worker_command``.
    """

    def __init__(
        self, socket_path: str, *, timeout_s: float = 10.0, command: Sequence[str] | None = None
    ) -> None:
        self._socket = pod_resources.PodResources(socket_path, timeout_s=timeout_s)
        self._command = command or worker_command(socket_path, timeout_s=timeout_s)
        # A question that is repeated takes up to twice as long.
        self._timeout_s = _START_S + 2 * timeout_s
        self._child: _Child | None = None

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod holds which devices; see ``pod_resources.PodResources``."""
        return self._ask(podresources_lines.ASSIGNED, podresources_lines.pods)

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource; see ``pod_resources.PodResources``."""
        return self._ask(podresources_lines.ALLOCATABLE, podresources_lines.devices)

    def prepare(self) -> None:
        """Start the child; what is wrong with it shows when it is needed."""
        if self._child is None or self._child.is_over:
            with contextlib.suppress(errors.ClusterError, OSError, RuntimeError):
                self._socket.check()
                self._child = _Child(self._command)

    def dismiss(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _ask(self, question: str, understand: Callable[[Any], _Answer]) -> _Answer:
        # Found without a child, which on a node whose socket we may not see would be for nothing.
        self._socket.check()
        try:
            answer = self._answer(question)
        except (EOFError, OSError, RuntimeError, ValueError) as error:
            raise self._socket.unavailable(f"the process that asks it: {error}") from error
        if "error" in answer:
            raise errors.ClusterError(
                answer["error"], reason=errors.Reason.POD_RESOURCES_UNAVAILABLE
            )
        return understand(answer[question])

    def _answer(self, question: str) -> dict[str, Any]:
        child, self._child = self._child, None
        if child is not None:
            # It may have ended of itself in this very moment: only a new one's end means anything.
            with contextlib.suppress(EOFError, BrokenPipeError):
                return self._asked(child, question)
        return self._asked(_Child(self._command), question)

    def _asked(self, child: "_Child", question: str) -> dict[str, Any]:
        try:
            answer = child.ask(question, self._timeout_s)
        except BaseException:
            child.end()
            raise
        self._child = child
        return answer


class _Child:
    """A running worker; gives everything back when it ends, also when nobody asks any more."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        Raises:
            OSError: It cannot be started.
            RuntimeError: There is no thread left.
        """
        with contextlib.ExitStack() as undo:
            self._said = os.memfd_create("kubelet-worker-stderr", os.MFD_CLOEXEC)
            undo.callback(os.close, self._said)
            self._process = subprocess.Popen(  # noqa: S603 - our own program, without a shell
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None  # noqa: S101 - as it was ordered
                undo.callback(pipe.close)
            self._lock = threading.Lock()
            self.is_over = False
            """Whether it has ended and nothing is left of it."""
            self._reaper = threading.Thread(target=self._reap, name="kubelet-worker", daemon=True)
            with self._lock:
                self._reaper.start()
                self._remains = undo.pop_all()

    def ask(self, question: str, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            EOFError: It has ended; with what it said about that.
            OSError: It could not be reached, or gave no answer in time.
            ValueError: It answered nonsense.
        """
        with self._lock:
            if self.is_over:
                raise EOFError("has ended")
            assert self._process.stdin is not None  # noqa: S101 - as it was ordered
            self._process.stdin.write(question.encode() + b"\n")
            line = self._read_line(time.monotonic() + timeout_s)
            answer: dict[str, Any] = json.loads(line)
            return answer

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._reaper.join()

    def _reap(self) -> None:
        self._process.wait()
        with self._lock, self._remains:
            self.is_over = True

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - as it was ordered
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        line = bytearray()
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            chunk = os.read(fd, _CHUNK)
            if not chunk:
                raise EOFError(f"ended: {self._last_words()}")
            line += chunk
        return bytes(line)

    def _last_words(self) -> str:
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, _STDERR_TOLD, max(0, size - _STDERR_TOLD))
        return said.decode(errors="replace").strip() or "without a word"
