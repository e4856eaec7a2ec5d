"""Ask kubelet which pods have which devices, over its PodResources socket.

gRPC with protobuf is a third of the agent's memory, and never leaves a process again. So an agent
has a worker ask (this module as a program), which ends when no question has come for a while.
Other processes import gRPC with the first question.
"""

import contextlib
import pathlib
import stat
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters import lean_imports
from mig_manager.adapters.host import subprocesses
from mig_manager.core.node import cluster

_LARGEST_ANSWER = 16 << 20
"""Bytes; gRPC's default of 4 MiB is too small for a node full of pods with many devices."""
_ATTEMPTS = 5
_PAUSE_S = 0.2
"""Between attempts when kubelet's rate limit (100 a second, bursts of 10) has refused us."""
_LINGER_S = 15.0
"""Longer than the pauses between two questions of one run."""
_START_S = 30.0
"""How long a worker's start may take on a busy machine."""
_END_S = 2.0


class PodResources:
    """Implements ``ports.DeviceAllocations``; ``timeout_s`` is for one question.

    Each question opens the socket, because kubelet creates a new one at each start. A missing
    socket is an error; it must never look like a node without workloads.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float = 10.0,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._path = pathlib.Path(socket_path)
        self._timeout_s = timeout_s
        self._sleep = sleep or threading.Event().wait

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod has which devices; see ``ports.DeviceAllocations``.

        Kubelet reports app containers and sidecars only, not a running init container.
        """
        answer = self._ask("List", "ListPodResourcesResponse")
        return tuple(
            cluster.PodDevices(
                namespace=pod.namespace,
                name=pod.name,
                device_ids=frozenset().union(
                    *(
                        _plain_ids(entry.device_ids)
                        for container in pod.containers
                        for entry in container.devices
                    )
                ),
                claim_drivers=frozenset(
                    device.driver_name
                    for container in pod.containers
                    for claim in container.dynamic_resources
                    for device in claim.claim_resources
                ),
                gpu_resources=frozenset(
                    entry.resource_name
                    for container in pod.containers
                    for entry in container.devices
                    if entry.resource_name.startswith(cluster.RESOURCE_PREFIX)
                ),
            )
            for pod in answer.pod_resources
        )

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource; needs kubelet 1.23 or newer."""
        answer = self._ask("GetAllocatableResources", "AllocatableResourcesResponse")
        found: dict[str, frozenset[str]] = {}
        # Kubelet lists one resource several times, once for each NUMA node.
        for entry in answer.devices:
            known = found.get(entry.resource_name, frozenset())
            found[entry.resource_name] = known | _plain_ids(entry.device_ids)
        return found

    def check(self) -> None:
        """Raise ClusterError, POD_RESOURCES_UNAVAILABLE, if the socket does not exist."""
        try:
            mode = self._path.stat().st_mode
        except OSError as err:
            raise self.unavailable(err.strerror or str(err)) from err
        if not stat.S_ISSOCK(mode):
            raise self.unavailable("not a socket")

    def unavailable(self, detail: str) -> errors.ClusterError:
        """Return the error for a question without an answer."""
        return errors.ClusterError(
            f"kubelet does not report which pods have which devices ({self._path}): {detail}",
            reason=errors.Reason.POD_RESOURCES_UNAVAILABLE,
        )

    def open_channel(self) -> Any:
        """Return a gRPC channel to the socket; the first one starts gRPC's threads."""
        options = (
            ("grpc.max_receive_message_length", _LARGEST_ANSWER),
            ("grpc.enable_http_proxy", 0),
            # A shared pool would remember the failed connection of an earlier channel.
            ("grpc.use_local_subchannel_pool", 1),
        )
        target = f"unix:{urllib.parse.quote(str(self._path.absolute()))}"
        return load().insecure_channel(target, options=options)

    def _ask(self, method: str, answer: str) -> Any:
        """Return the message with which kubelet answers a request, which has no fields."""
        grpc = load()
        from mig_manager.adapters import kubelet_messages  # noqa: PLC0415

        self.check()
        method = f"/{kubelet_messages.SERVICE}/{method}"
        deadline_s = time.monotonic() + self._timeout_s
        attempts = 0
        while True:
            attempts += 1
            try:
                with self.open_channel() as channel:
                    data = channel.unary_unary(method)(b"", timeout=self._timeout_s)
                # Not by gRPC, which writes a traceback for malformed bytes.
                return getattr(kubelet_messages, answer).FromString(data)
            except grpc.RpcError as err:
                is_rate_limited = err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                is_last = attempts == _ATTEMPTS or time.monotonic() >= deadline_s
                if is_last or not is_rate_limited:
                    detail = f"{method}: {err.code().name}: {err.details()}"
                    raise self.unavailable(detail) from err
            except kubelet_messages.DecodeError as err:
                raise self.unavailable(f"{method}: the answer is malformed: {err}") from err
            self._sleep(_PAUSE_S)


def load() -> types.ModuleType:
    """Import what a question needs; return gRPC."""
    # A quarter of its import, and of no use without coroutines.
    with lean_imports.omitted("grpc.aio"):
        import grpc  # noqa: PLC0415

    from mig_manager.adapters import kubelet_messages  # noqa: PLC0415, F401

    return grpc


def _plain_ids(ids: Iterable[str]) -> frozenset[str]:
    """Drop the ``::n`` that the device plugin appends to each replica of a shared device."""
    return frozenset(one.partition("::")[0] for one in ids)


def worker_command(
    socket_path: str, *, timeout_s: float = 10.0, linger_s: float = _LINGER_S
) -> tuple[str, ...]:
    """Return the command line of the worker, which ends ``linger_s`` after the last question."""
    module = "mig_manager.adapters.pod_resources"
    return subprocesses.python(module, socket_path, str(timeout_s), str(linger_s))


class WorkerPodResources:
    """Implements ``ports.DeviceAllocations`` and ``standbys.Standby``; for one thread at a time.

    As a standby it starts the worker ahead, which imports what it needs and waits.
    """

    def __init__(
        self, socket_path: str, *, timeout_s: float = 10.0, command: Sequence[str] | None = None
    ) -> None:
        self._socket = PodResources(socket_path, timeout_s=timeout_s)
        self._command = command or worker_command(socket_path, timeout_s=timeout_s)
        # A question that is repeated takes up to twice as long.
        self._timeout_s = _START_S + 2 * timeout_s
        self._worker: _Worker | None = None

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod has which devices, as ``PodResources`` does."""
        pods: tuple[cluster.PodDevices, ...] = self._ask("assigned")
        return pods

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource, as ``PodResources`` does."""
        devices: Mapping[str, frozenset[str]] = self._ask("allocatable")
        return devices

    def prepare(self) -> None:
        """Start the worker; a failure shows when the worker is needed."""
        if self._worker is None or self._worker.is_over:
            with contextlib.suppress(errors.ClusterError, OSError, RuntimeError):
                self._socket.check()
                self._worker = _Worker(self._command)

    def expect_change(self) -> None:
        """Start the worker."""
        self.prepare()

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
    """A running worker, reaped as soon as it ends, also when no question follows.

    Raises:
        OSError: It cannot be started; RuntimeError: no thread is left.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self.is_over = False
        self._child = subprocesses.Child(command)
        self._reaper = threading.Thread(target=self._reap, name="kubelet-worker", daemon=True)
        try:
            self._reaper.start()
        except BaseException:
            self._child.end()
            raise

    def ask(self, question: str, timeout_s: float) -> Any:
        """Return the outcome of a question; raises as ``Child.ask`` does, EOFError with stderr."""
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


def main() -> None:
    """Answer the questions of ``WorkerPodResources`` until none has come for a while."""
    path, timeout_s, linger_s = sys.argv[1:]
    kubelet = PodResources(path, timeout_s=float(timeout_s))
    parent = subprocesses.Parent()
    # A worker that was started ahead is asked only later; load and set up what it needs then.
    kubelet.open_channel().close()
    while (question := parent.receive(float(linger_s))) is not None:
        parent.send(subprocesses.attempt(getattr(kubelet, question)))


if __name__ == "__main__":
    main()
