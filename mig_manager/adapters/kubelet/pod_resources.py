"""Ask kubelet which pods have which devices, over its PodResources socket.

gRPC and protobuf cost 15 MB, so they are imported by the first question and not before. As a
program this is the worker of ``client``, which asks for an agent without gRPC.
"""

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


class PodResources:
    """Implements ``ports.DeviceAllocations``.

    Each question opens the socket, because kubelet creates a new one at each start. A missing
    socket is an error; it must never look like a node without workloads.

    Args:
        socket_path: For example ``/var/lib/kubelet/pod-resources/kubelet.sock``.
        timeout_s: How long one question may take.
        sleep: Waits between attempts; None really waits.
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

    def warm_up(self) -> None:
        """Load and set up what the first question needs, without asking."""
        with self._channel():
            # gRPC starts its threads with the first channel.
            pass

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod has which devices; see ``ports.DeviceAllocations``.

        Kubelet reports app containers and sidecars only, not a running init container.
        """
        from mig_manager.adapters.kubelet import messages  # noqa: PLC0415

        answer = self._ask(
            messages.LIST, messages.ListPodResourcesRequest(), messages.ListPodResourcesResponse
        )
        return tuple(_pod_devices(pod) for pod in answer.pod_resources)

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource; see ``ports.DeviceAllocations``."""
        from mig_manager.adapters.kubelet import messages  # noqa: PLC0415

        answer = self._ask(
            messages.GET_ALLOCATABLE,
            messages.AllocatableResourcesRequest(),
            messages.AllocatableResourcesResponse,
        )
        found: dict[str, frozenset[str]] = {}
        # Kubelet lists one resource several times, once for each NUMA node.
        for entry in answer.devices:
            known = found.get(entry.resource_name, frozenset())
            found[entry.resource_name] = known | _plain_ids(entry.device_ids)
        return found

    def _ask(self, method: str, request: Any, answer: Any) -> Any:
        grpc = load()
        self.check()
        try:
            return self._call_with_retries(method, request, answer)
        except grpc.RpcError as err:
            detail = f"{method}: {err.code().name}: {err.details()}"
            raise self.unavailable(detail) from err
        except ValueError as err:
            raise self.unavailable(f"{method}: the answer is malformed: {err}") from err

    def _call_with_retries(self, method: str, request: Any, answer: Any) -> Any:
        grpc = load()
        deadline = time.monotonic() + self._timeout_s
        for _attempt in range(_ATTEMPTS - 1):
            try:
                return self._call(method, request, answer)
            except grpc.RpcError as err:
                is_rate_limited = err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not is_rate_limited or time.monotonic() >= deadline:
                    raise
            self._sleep(_PAUSE_S)
        return self._call(method, request, answer)

    def _call(self, method: str, request: Any, answer: Any) -> Any:
        from mig_manager.adapters.kubelet import messages  # noqa: PLC0415

        with self._channel() as channel:
            # Parsed here and not by gRPC, which writes a traceback for malformed bytes.
            call: Any = channel.unary_unary(
                method, request_serializer=type(request).SerializeToString
            )
            return messages.parse(answer, call(request, timeout=self._timeout_s))

    def _channel(self) -> Any:
        options = (
            ("grpc.max_receive_message_length", _LARGEST_ANSWER),
            ("grpc.enable_http_proxy", 0),
            # A shared pool would remember the failed connection of an earlier channel.
            ("grpc.use_local_subchannel_pool", 1),
        )
        target = f"unix:{urllib.parse.quote(str(self._path.absolute()))}"
        return load().insecure_channel(target, options=options)

    def check(self) -> None:
        """Check that the socket exists.

        Raises:
            ClusterError: With POD_RESOURCES_UNAVAILABLE: it does not.
        """
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


def load() -> types.ModuleType:
    """Import what a question needs; return gRPC."""
    # A quarter of its import, and of no use without coroutines.
    with lean_imports.omitted("grpc.aio"):
        import grpc  # noqa: PLC0415

    from mig_manager.adapters.kubelet import messages  # noqa: PLC0415, F401

    return grpc


def _pod_devices(pod: Any) -> cluster.PodDevices:
    entries = [entry for container in pod.containers for entry in container.devices]
    return cluster.PodDevices(
        namespace=pod.namespace,
        name=pod.name,
        device_ids=frozenset().union(*(_plain_ids(entry.device_ids) for entry in entries)),
        claim_drivers=frozenset(
            device.driver_name
            for container in pod.containers
            for claim in container.dynamic_resources
            for device in claim.claim_resources
        ),
    )


def _plain_ids(ids: Iterable[str]) -> frozenset[str]:
    """Drop the ``::n`` that the device plugin appends to each replica of a shared device."""
    return frozenset(one.partition("::")[0] for one in ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the questions of ``client`` until none has come for a while."""
    path, timeout_s, linger_s = sys.argv[1:] if argv is None else argv
    kubelet = PodResources(path, timeout_s=float(timeout_s))
    parent = subprocesses.Parent()
    # A worker that was started ahead is asked only later.
    kubelet.warm_up()
    questions: Mapping[str, Callable[[], object]] = {
        "assigned": kubelet.assigned,
        "allocatable": kubelet.allocatable,
    }
    while (question := parent.receive(float(linger_s))) is not None:
        parent.send(subprocesses.attempt(questions[question]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
