"""Kubelet's device manager: the devices that plugins registered, and the pods that have them.

``serving_pod_resources`` serves both as kubelet's PodResources v1 on a unix socket.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import threading
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc

from mig_manager import errors
from mig_manager.adapters import kubelet_messages
from mig_manager.core import timing
from mig_manager.sandbox.node import objects


class ShortageError(Exception):
    """A pod requests more devices than are healthy and free."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The devices of one pod."""

    namespace: str
    name: str
    containers: Mapping[str, Mapping[str, Sequence[str]]]
    """Devices by resource by container; includes containers without devices."""

    @property
    def device_ids(self) -> frozenset[str]:
        """All devices of the pod."""
        return frozenset(
            id_ for listed in self.containers.values() for ids in listed.values() for id_ in ids
        )


FORGET_S = 300.0
"""How long kubelet remembers the resources of a plugin that ended (``endpointStopGracePeriod`` in
``pkg/kubelet/cm/devicemanager/types.go``)."""


class DeviceManager:
    """Devices of one node; safe for use by any thread."""

    def __init__(self, clock: timing.Clock) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._devices: dict[str, tuple[str, ...]] = {}
        """Device ids by resource, also while kubelet remembers a plugin that ended."""
        self._ended_at: dict[str, float] = {}
        """When the plugin of a resource ended."""
        self._forgotten: set[str] = set()
        self._healthy: set[str] = set()
        """Resources whose plugin is connected."""
        self._allocations: dict[str, Allocation] = {}

    def register(self, resources: Mapping[str, tuple[str, ...]]) -> None:
        """Register a plugin's resources; others stay unchanged."""
        with self._lock:
            self._devices.update(resources)
            self._healthy.update(resources)
            self._forgotten.difference_update(resources)
            for resource in resources:
                self._ended_at.pop(resource, None)

    def disconnect(self, resources: Collection[str]) -> None:
        """Mark the resources of a plugin that ended as unhealthy."""
        with self._lock:
            for resource in self._healthy.intersection(resources):
                self._ended_at[resource] = self._clock.monotonic()
            self._healthy.difference_update(resources)

    def admit(self, pod: Mapping[str, Any]) -> Allocation:
        """Allocate a pod's devices; another call for the pod returns the same ones.

        A pod gets no device of a forgotten resource, and still runs. A resource that a
        ResourceClaim provides is not ours (``isDRAExtendedResource`` of kubelet).

        Raises:
            ShortageError: Too few devices are healthy and free; nothing was allocated.
        """
        with self._lock:
            former = self._allocations.get(objects.uid(pod))
            if former is not None:
                return former
            used = frozenset[str]().union(*(a.device_ids for a in self._allocations.values()))
            free = {
                resource: [id_ for id_ in device_ids if id_ not in used]
                for resource, device_ids in self._allocatable().items()
            }
            claimed = objects.claimed_resources(pod)
            containers: dict[str, dict[str, Sequence[str]]] = {}
            for container in pod["spec"]["containers"]:
                listed = containers.setdefault(str(container["name"]), {})
                for resource, count in objects.gpu_counts(container).items():
                    if resource in self._forgotten or (container["name"], resource) in claimed:
                        continue
                    available = free.get(resource, [])
                    if count > len(available):
                        raise ShortageError(
                            f"cannot allocate {count} of {resource}: {len(available)} healthy "
                            "and free"
                        )
                    listed[resource], free[resource] = available[:count], available[count:]
            allocation = Allocation(
                namespace=objects.namespace(pod), name=objects.name(pod), containers=containers
            )
            self._allocations[objects.uid(pod)] = allocation
            return allocation

    def release(self, uid: str) -> None:
        """Release a pod's devices, if it has any."""
        with self._lock:
            self._allocations.pop(uid, None)

    def allocations(self) -> tuple[Allocation, ...]:
        """Return the devices of every pod that kubelet runs."""
        with self._lock:
            return tuple(self._allocations.values())

    def allocatable(self) -> dict[str, tuple[str, ...]]:
        """Return the healthy device ids by resource, in use or not."""
        with self._lock:
            return self._allocatable()

    def status(
        self, present: Mapping[str, int] | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return (capacity, allocatable) of the node's next status.

        Kubelet reports a forgotten resource once, with 0. After that it knows only the ``present``
        capacity, which it copies into allocatable.
        """
        with self._lock:
            now = self._clock.monotonic()
            expired = {r for r, ended_at in self._ended_at.items() if now - ended_at >= FORGET_S}
            for resource in expired:
                del self._devices[resource], self._ended_at[resource]
            self._forgotten |= expired
            counts = {resource: len(ids) for resource, ids in self._devices.items()}
            capacity = {**(present or {}), **dict.fromkeys(expired, 0), **counts}
            healthy = {r: n if r in self._healthy else 0 for r, n in counts.items()}
            return capacity, {**capacity, **healthy}

    def _allocatable(self) -> dict[str, tuple[str, ...]]:
        return {r: device_ids for r, device_ids in self._devices.items() if r in self._healthy}


# -- PodResources -----------------------------------------------------------------------------

_MAX_PATH = 107  # bytes of ``sun_path`` on Linux, without the final zero
_STOP_S = 5.0


@contextlib.contextmanager
def serving_pod_resources(path: pathlib.Path, manager: DeviceManager) -> Iterator[None]:
    """Serve List and GetAllocatableResources during the context.

    It creates the socket's directory and replaces an old socket.

    Raises:
        UsageError: The path is too long for a unix socket.
    """
    path = path.absolute()
    if len(str(path).encode()) > _MAX_PATH:
        raise errors.UsageError(
            f"the path of a unix socket has at most {_MAX_PATH} bytes: {path}",
            remedy="Set TMPDIR to a folder with a shorter path.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with concurrent.futures.ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="sandbox-podresources"
    ) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((_handlers(manager),))
        server.add_insecure_port(f"unix:{urllib.parse.quote(str(path))}")
        server.start()
        try:
            yield
        finally:
            server.stop(grace=0).wait(_STOP_S)
            path.unlink(missing_ok=True)


def _handlers(manager: DeviceManager) -> grpc.GenericRpcHandler:
    def list_pods(_request: Any, _context: grpc.ServicerContext) -> Any:
        return kubelet_messages.ListPodResourcesResponse(
            pod_resources=[
                kubelet_messages.PodResources(
                    name=allocation.name,
                    namespace=allocation.namespace,
                    containers=[
                        kubelet_messages.ContainerResources(
                            name=container, devices=_devices(by_resource)
                        )
                        for container, by_resource in allocation.containers.items()
                    ],
                )
                for allocation in manager.allocations()
            ]
        )

    def list_allocatable(_request: Any, _context: grpc.ServicerContext) -> Any:
        return kubelet_messages.AllocatableResourcesResponse(
            devices=_devices(manager.allocatable())
        )

    methods = {
        "List": (list_pods, kubelet_messages.ListPodResourcesRequest),
        "GetAllocatableResources": (
            list_allocatable,
            kubelet_messages.AllocatableResourcesRequest,
        ),
    }
    return grpc.method_handlers_generic_handler(
        kubelet_messages.SERVICE,
        {
            name: grpc.unary_unary_rpc_method_handler(
                behaviour,
                request_deserializer=request.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, (behaviour, request) in methods.items()
        },
    )


def _devices(by_resource: Mapping[str, Sequence[str]]) -> list[Any]:
    return [
        kubelet_messages.ContainerDevices(resource_name=resource, device_ids=device_ids)
        for resource, device_ids in sorted(by_resource.items())
    ]
