"""NVIDIA's device plugin: what it makes of the GPUs it sees, and when it sees them.

The facts are those of k8s-device-plugin v0.20: it looks at the GPUs once, when it starts, and
advertises what it saw until it ends; while it runs its health watcher holds an NVML client on
every GPU. Some layouts make it exit instead, which kubelet turns into CrashLoopBackOff.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import model
from mig_manager.sandbox.cluster import nodeoptions, objects, programs


class ShortageError(Exception):
    """A pod asks for more devices than are healthy and free."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The devices of one resource that one container got."""

    container: str
    resource: str
    device_ids: tuple[str, ...]
    is_listed: bool
    """False for an ordinary init container: PodResources does not list those."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The devices of one pod."""

    namespace: str
    name: str
    containers: tuple[str, ...]
    """The containers that PodResources lists, with or without devices."""
    grants: tuple[Grant, ...]

    @property
    def device_ids(self) -> frozenset[str]:
        """All devices of the pod."""
        return frozenset(id_ for grant in self.grants for id_ in grant.device_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    device_ids: tuple[str, ...]
    gone_since: float | None = None


class DeviceManager:
    """Devices of one node; safe to ask from any thread.

    Args:
        forget_s: How long a resource keeps its capacity after its plugin has gone, in seconds.
    """

    def __init__(self, *, forget_s: float) -> None:
        self._forget_s = forget_s
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}
        self._allocations: dict[str, Allocation] = {}

    def register(self, resources: Mapping[str, tuple[str, ...]]) -> None:
        """Take over a plugin's registration; names it does not bring stay as they are."""
        with self._lock:
            for resource, device_ids in resources.items():
                self._endpoints[resource] = _Endpoint(device_ids=device_ids)

    def disconnect(self, resources: Iterable[str], now: float) -> None:
        """Note that a plugin has gone: what it registered is unhealthy from now on."""
        with self._lock:
            for resource in resources:
                self._endpoints[resource] = dataclasses.replace(
                    self._endpoints[resource], gone_since=now
                )

    def lose_power(self, now: float) -> None:
        """Note that the machine went down: no plugin is connected, and nobody holds a device.

        Kubelet's checkpoint remembers the names of resources, so the node goes on showing them.
        """
        with self._lock:
            self._allocations.clear()
            for resource, endpoint in self._endpoints.items():
                if endpoint.gone_since is None:
                    self._endpoints[resource] = dataclasses.replace(endpoint, gone_since=now)

    def admit(self, pod: Mapping[str, Any]) -> Allocation:
        """Give a pod its devices, once; a second call returns the same ones.

        Raises:
            ShortageError: Too few devices are healthy and free; nothing has been given.
        """
        with self._lock:
            known = self._allocations.get(objects.uid(pod))
            if known is not None:
                return known
            taken = {id_ for a in self._allocations.values() for id_ in a.device_ids}
            free = {
                resource: [id_ for id_ in device_ids if id_ not in taken]
                for resource, device_ids in self._healthy().items()
            }
            allocation = _allocate(pod, free)
            self._allocations[objects.uid(pod)] = allocation
            return allocation

    def release(self, uid: str) -> None:
        """Take a pod's devices back; done when it has none."""
        with self._lock:
            self._allocations.pop(uid, None)

    def assigned(self) -> tuple[Allocation, ...]:
        """Return the devices of every pod that kubelet runs."""
        with self._lock:
            return tuple(self._allocations.values())

    def allocatable(self) -> dict[str, tuple[str, ...]]:
        """Return the healthy device ids by resource, in use or not."""
        with self._lock:
            return self._healthy()

    def status(self, now: float) -> tuple[dict[str, int], dict[str, int]]:
        """Return (capacity, allocatable) as the node's status shows them.

        A name once registered stays, with 0: kubelet never removes it from the node object.
        """
        with self._lock:
            capacity = {
                resource: 0 if self._is_forgotten(endpoint, now) else len(endpoint.device_ids)
                for resource, endpoint in self._endpoints.items()
            }
            healthy = self._healthy()
            return capacity, {r: len(healthy.get(r, ())) for r in self._endpoints}

    def _is_forgotten(self, endpoint: _Endpoint, now: float) -> bool:
        return endpoint.gone_since is not None and now - endpoint.gone_since > self._forget_s

    def _healthy(self) -> dict[str, tuple[str, ...]]:
        return {
            resource: endpoint.device_ids
            for resource, endpoint in self._endpoints.items()
            if endpoint.gone_since is None
        }


def _allocate(pod: Mapping[str, Any], free: dict[str, list[str]]) -> Allocation:
    """Hand out from ``free``, which is used up; app containers inherit from init containers."""
    initial = pod["spec"].get("initContainers") or ()
    lasting = [*(c for c in initial if objects.is_sidecar(c)), *pod["spec"]["containers"]]
    inherited: dict[str, list[str]] = {}
    grants: list[Grant] = []
    for container in (c for c in initial if not objects.is_sidecar(c)):
        for resource, count in objects.gpu_counts(container).items():
            had = inherited.setdefault(resource, [])
            had += _take(free, resource, count=max(0, count - len(had)))
            grants.append(_grant(container, resource, had[:count], is_listed=False))
    for container in lasting:
        for resource, count in objects.gpu_counts(container).items():
            had = inherited.get(resource, [])
            reused, inherited[resource] = had[:count], had[count:]
            fresh = _take(free, resource, count=count - len(reused))
            grants.append(_grant(container, resource, reused + fresh, is_listed=True))
    return Allocation(
        namespace=objects.namespace(pod),
        name=objects.name(pod),
        containers=tuple(str(c["name"]) for c in lasting),
        grants=tuple(grants),
    )


def _grant(
    container: Mapping[str, Any], resource: str, device_ids: Iterable[str], *, is_listed: bool
) -> Grant:
    return Grant(
        container=str(container["name"]),
        resource=resource,
        device_ids=tuple(device_ids),
        is_listed=is_listed,
    )


def _take(free: dict[str, list[str]], resource: str, *, count: int) -> list[str]:
    available = free.get(resource, [])
    if count > len(available):
        raise ShortageError(
            f"cannot allocate {count} of {resource}: {len(available)} healthy and free"
        )
    taken, free[resource] = available[:count], available[count:]
    return taken


_log = logging.getLogger(__name__)

_GPU = "nvidia.com/gpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """What the plugin makes of the GPUs."""

    resources: Mapping[str, tuple[str, ...]]
    """Device ids by resource name; empty: the plugin waits and registers nothing."""
    warnings: tuple[str, ...] = ()


def enumerate_devices(
    gpus: Sequence[nodeoptions.SeenGpu], strategy: nodeoptions.Strategy
) -> Enumeration:
    """Turn GPUs and MIG devices into resources.

    Raises:
        ExitedError: The plugin exits over this layout.
    """
    match strategy:
        case nodeoptions.Strategy.NONE:
            return _of({_GPU: [gpu.uuid for gpu in gpus]})
        case nodeoptions.Strategy.SINGLE:
            return _single(gpus)
        case nodeoptions.Strategy.MIXED:
            return _mixed(gpus)


def resource_of(profile: model.Profile) -> str:
    """Return the resource name of a MIG profile under strategy mixed.

    Raises:
        ExitedError: The profile takes a part of its GPU instance; no pattern matches it.
    """
    name = str(profile)
    if "c." in name:
        raise programs.ExitedError(
            f"MIG profile {name} does not match any resource pattern of strategy mixed"
        )
    # As the plugin writes it (k8s-device-plugin, addMIGResources), and not as the agent does.
    return "nvidia.com/mig-" + name.replace("+", ".")


def _single(gpus: Sequence[nodeoptions.SeenGpu]) -> Enumeration:
    with_mig = [gpu for gpu in gpus if gpu.is_mig_enabled]
    if not with_mig:
        return _of({_GPU: [gpu.uuid for gpu in gpus]})
    if len(with_mig) != len(gpus):
        raise programs.ExitedError("strategy single: MIG is enabled on some GPUs only")
    empty = [str(gpu.index) for gpu in gpus if not gpu.mig_devices]
    if empty:
        raise programs.ExitedError(
            f"strategy single: MIG is enabled without any MIG device on GPU {', '.join(empty)}"
        )
    found = [device for gpu in gpus for device in gpu.mig_devices]
    profiles = {device.profile for device in found}
    if len(profiles) > 1:
        names = ", ".join(sorted(map(str, profiles)))
        raise programs.ExitedError(f"strategy single: MIG devices differ: {names}")
    return _of({_GPU: [device.uuid for device in found]})


def _mixed(gpus: Sequence[nodeoptions.SeenGpu]) -> Enumeration:
    resources: dict[str, list[str]] = {}
    warnings: list[str] = []
    for gpu in gpus:
        if not gpu.is_mig_enabled:
            resources.setdefault(_GPU, []).append(gpu.uuid)
        elif not gpu.mig_devices:
            warnings.append(f"MIG is enabled on GPU {gpu.index} without any MIG device")
        for device in gpu.mig_devices:
            resources.setdefault(resource_of(device.profile), []).append(device.uuid)
    return _of(resources, warnings)


def _of(resources: Mapping[str, Sequence[str]], warnings: Sequence[str] = ()) -> Enumeration:
    filled = {name: tuple(ids) for name, ids in resources.items() if ids}
    return Enumeration(resources=filled, warnings=tuple(warnings))


class Plugin:
    """The plugin as the program of a pod's container.

    Args:
        gpus: The node's hardware.
        manager: The kubelet to register with.
        strategy: The plugin's MIG strategy.
        start_s: From the start of the container to the look at the GPUs, in seconds.
    """

    def __init__(
        self,
        *,
        gpus: nodeoptions.NodeGpus,
        manager: DeviceManager,
        strategy: nodeoptions.Strategy,
        start_s: float,
    ) -> None:
        self._gpus = gpus
        self._manager = manager
        self._strategy = strategy
        self._start_s = start_s
        self._due: float | None = None
        self._clients = contextlib.ExitStack()
        self._registered: tuple[str, ...] = ()

    @property
    def due(self) -> float | None:
        """When it will look at the GPUs; None when it has, or does not run."""
        return self._due

    def start(self, now: float) -> None:
        """Begin to start up; the GPUs are looked at ``start_s`` later."""
        self._due = now + self._start_s

    def poll(self, now: float) -> None:
        """Enumerate and register once the start-up time has passed.

        Raises:
            ExitedError: The layout, or the driver, makes the plugin exit.
        """
        if self._due is None or now < self._due:
            return
        self._due = None
        try:
            gpus = self._gpus.observe()
            found = enumerate_devices(gpus, self._strategy)
            for gpu in gpus:
                self._clients.callback(
                    self._gpus.hold(gpu.uuid, process="nvidia-device-plugin", computes=False)
                )
        except errors.HardwareError as error:
            self._clients.close()
            raise programs.ExitedError(str(error)) from error
        for warning in found.warnings:
            _log.warning("device plugin: %s", warning)
        self._manager.register(found.resources)
        self._registered = tuple(found.resources)

    def stop(self, now: float) -> None:
        """End: let go of the GPUs and disconnect from kubelet."""
        self._due = None
        self._clients.close()
        # Only what is still ours: this may be called again when a successor has registered.
        self._manager.disconnect(self._registered, now)
        self._registered = ()
