"""Query kubelet for the devices of pods, over its PodResources socket.

gRPC with protobuf is a third of the agent's memory, and a process cannot unload it. So an agent
uses a worker (this module as a program), which ends after a while without a request. Other
processes import gRPC with the first request.
"""

import contextlib
import pathlib
import socket
import stat
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters import lean_imports
from mig_manager.adapters.host import subprocesses, worker_messages, worker_parent
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import pod_object, well_known

_MAX_ANSWER_BYTES = 16 << 20
"""Bytes; gRPC's default of 4 MiB is too small for a node full of pods with many devices."""
_TIMEOUT_S = 10.0
_ATTEMPTS = 5
_PAUSE_S = 0.2
"""Between attempts after a refusal by kubelet's rate limit (100 a second, bursts of 10)."""
_LINGER_S = 15.0  # longer than the pauses between two requests of one run
_WORKER_TIMEOUT_S = 30.0 + 2 * _TIMEOUT_S
"""For its start on a busy machine, and for a request, which takes up to twice as long with
retries."""
_END_S = 2.0


class PodResources:
    """Implements ``ports.DeviceAllocations``; ``timeout_s`` is for one request.

    Each request opens the socket, because kubelet creates a new one at each start. A missing
    socket is an error; it must never look like a node without workloads.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        timeout_s: float = _TIMEOUT_S,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._path = pathlib.Path(socket_path)
        self._timeout_s = timeout_s
        self._sleep = sleep or threading.Event().wait

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        """Return which pod has which devices; see ``ports.DeviceAllocations``.

        Kubelet reports app containers and sidecars only, not a running init container.
        """
        response = self._request("List", "ListPodResourcesResponse")
        return tuple(map(_pod_devices, response.pod_resources))

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy devices; see ``ports.DeviceAllocations``; needs kubelet 1.23+."""
        response = self._request("GetAllocatableResources", "AllocatableResourcesResponse")
        devices: dict[str, frozenset[str]] = {}
        # Kubelet lists one resource several times, once for each NUMA node.
        for entry in response.devices:
            ids = devices.get(entry.resource_name, frozenset())
            devices[entry.resource_name] = ids.union(entry.device_ids)
        return devices

    def has_started(self, *, is_booting: bool = False) -> bool:
        """Return whether kubelet has created its socket since the machine was booted.

        A stopped kubelet leaves the socket, and the containers of its pods run on. ``is_booting``
        is whether the clock may still be behind, and the socket be of an earlier boot.
        """
        if _is_of_this_boot(self._path, is_booting=is_booting):
            return True
        # With another --root-dir, such as k0s', only the socket for device plugins is here.
        plugins = self._path.parent.with_name("device-plugins") / "kubelet.sock"
        return not is_booting and _is_of_this_boot(plugins)

    def check(self) -> None:
        """Raise KubeletError if the socket does not exist."""
        try:
            mode = self._path.stat().st_mode
        except OSError as err:
            raise self.unavailable(err.strerror or str(err)) from err
        if not stat.S_ISSOCK(mode):
            raise self.unavailable("not a socket")

    def unavailable(self, detail: str) -> errors.KubeletError:
        """Return the error for a request without a response."""
        return errors.KubeletError(
            f"kubelet does not report which pods have which devices ({self._path}): {detail}"
        )

    def open_channel(self) -> Any:
        """Return a gRPC channel to the socket; the first one starts gRPC's threads."""
        options = (
            ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
            ("grpc.enable_http_proxy", 0),
            # A shared pool would remember the failed connection of an earlier channel.
            ("grpc.use_local_subchannel_pool", 1),
        )
        target = f"unix:{urllib.parse.quote(str(self._path.absolute()))}"
        return load().insecure_channel(target, options=options)

    def _request(self, method: str, response: str) -> Any:
        """Send a request, which has no fields; return kubelet's response of this type."""
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
                return getattr(kubelet_messages, response).FromString(data)
            except grpc.RpcError as err:
                is_rate_limited = err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                is_last = attempts == _ATTEMPTS or time.monotonic() >= deadline_s
                if is_last or not is_rate_limited:
                    detail = f"{method}: {err.code().name}: {err.details()}"
                    raise self.unavailable(detail) from err
            except kubelet_messages.DecodeError as err:
                raise self.unavailable(f"{method}: the answer is malformed: {err}") from err
            self._sleep(_PAUSE_S)


def _is_of_this_boot(path: pathlib.Path, *, is_booting: bool = False) -> bool:
    """Return whether kubelet has created this socket since the machine was booted."""
    try:
        created_s = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # unknown, as ``check`` will say
    now_s = time.time()
    is_certain = not is_booting or created_s <= now_s
    if is_certain and created_s >= now_s - time.clock_gettime(time.CLOCK_BOOTTIME):
        return True
    # A clock that was set since may make the socket appear older.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return True
    return False


def load() -> types.ModuleType:
    """Import the modules for a request; return gRPC."""
    # A quarter of its import, and useless without coroutines.
    with lean_imports.omitted("grpc.aio"):
        import grpc  # noqa: PLC0415

    from mig_manager.adapters import kubelet_messages  # noqa: PLC0415, F401

    return grpc


def _pod_devices(pod: Any) -> pod_object.PodDevices:
    entries = [entry for container in pod.containers for entry in container.devices]
    names = {entry.resource_name for entry in entries}
    return pod_object.PodDevices(
        namespace=pod.namespace,
        name=pod.name,
        device_ids=resources.without_replicas(
            each for entry in entries for each in entry.device_ids
        ),
        claim_drivers=frozenset(
            device.driver_name
            for container in pod.containers
            for claim in container.dynamic_resources
            for device in claim.claim_resources
        ),
        gpu_resources=frozenset(n for n in names if n.startswith(well_known.RESOURCE_PREFIX)),
    )


def worker_command(socket_path: str, *, linger_s: float = _LINGER_S) -> tuple[str, ...]:
    """Return the command line of the worker, which ends ``linger_s`` after the last request."""
    module = "mig_manager.adapters.pod_resources"
    return subprocesses.python(module, socket_path, str(linger_s))


class WorkerPodResources:
    """Implements ``ports.DeviceAllocations``; for one thread at a time.

    ``start_ahead`` starts the worker, which imports what it needs and waits. It ends by itself, a
    while after the last request.
    """

    def __init__(self, socket_path: str, *, command: Sequence[str] | None = None) -> None:
        self._socket = PodResources(socket_path)
        self._command = command or worker_command(socket_path)
        self._worker: _Worker | None = None

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        """Return which pod has which devices, as ``PodResources`` does."""
        pods: tuple[pod_object.PodDevices, ...] = self._request("assigned_devices")
        return pods

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource, as ``PodResources`` does."""
        devices: Mapping[str, frozenset[str]] = self._request("allocatable")
        return devices

    def start_ahead(self) -> None:
        """Start the worker; a failure shows when the worker is needed."""
        if self._worker is None or self._worker.is_over:
            with contextlib.suppress(errors.KubeletError, OSError, RuntimeError):
                self._socket.check()
                self._worker = _Worker(self._command)

    def _request(self, method: str) -> Any:
        # Checked here: if we may not see the node's socket, a worker is useless.
        self._socket.check()
        worker, self._worker = self._worker, None
        try:
            message = None
            if worker is not None:
                # It may just have ended by itself: only a new worker's end is a failure.
                with contextlib.suppress(EOFError):
                    message = self._ask(worker, method)
            message = message or self._ask(_Worker(self._command), method)
        except (EOFError, OSError, RuntimeError, ValueError) as error:
            raise self._socket.unavailable(f"the process that asks it: {error}") from error
        return worker_messages.result(message)

    def _ask(self, worker: "_Worker", method: str) -> Any:
        try:
            message = worker.ask(method)
        except BaseException:
            worker.end()
            raise
        self._worker = worker
        return message


class _Worker:
    """A running worker, reaped as soon as it ends, also without a further request.

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

    def ask(self, method: str) -> Any:
        """Return the response to a request; raise as ``Child.ask``, EOFError with stderr."""
        with self._lock:
            if self.is_over:
                raise EOFError("has ended")
            try:
                return self._child.ask(method, timeout_s=_WORKER_TIMEOUT_S)
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
    """Serve the requests of ``WorkerPodResources``, and end after a while without one."""
    path, linger_s = sys.argv[1:]
    kubelet = PodResources(path)
    parent = worker_parent.Parent()
    # A worker is started ahead of its first request: load and set up everything now.
    kubelet.open_channel().close()
    while (method := parent.receive(float(linger_s))) is not None:
        parent.send(worker_messages.attempt(getattr(kubelet, method)))


if __name__ == "__main__":
    main()
