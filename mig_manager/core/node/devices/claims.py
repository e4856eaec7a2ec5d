"""Parse ResourceClaims and ResourceSlices: the devices that NVIDIA's DRA driver advertises.

The driver lists a node's GPUs and MIG devices once, when it starts, in ResourceSlices whose pool
has the node's name. A claim's allocation names devices of that pool, and the slice has the UUID of
each (dra-driver-nvidia-gpu v0.5: ``cmd/gpu-kubelet-plugin/deviceinfo.go`` and ``driver.go``).
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.core.node.devices import device_ids, strategies
from mig_manager.core.objects import pod_object, well_known

DEPLOY_LABEL = well_known.DEPLOY_LABEL_PREFIX + "dra-driver"
"""Node label by which the GPU operator's GPUCluster deploys the driver."""

_PASSTHROUGH = "vfio"  # attribute ``type`` of GPUs for virtual machines, which NVML does not see

_REPELLING = ("NoSchedule", "NoExecute")

Device = tuple[str, str]  # pool and name of a device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A ResourceSlice of the driver on our node."""

    name: str
    pool: str
    generation: int  # slices of an older generation than the newest of their pool are stale
    count: int  # how many slices its pool has in this generation
    uuids: Mapping[str, str]  # name of a device -> its UUID; empty: the device does not exist yet
    for_machines: frozenset[str]  # names of the devices for virtual machines
    taints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Taints of a faulty device, by its name, that keep pods away: KEP-5055."""
    profiles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Profiles of the MIG devices, by name of the device."""


def is_driver(pod: pod_object.Pod) -> bool:
    """Return whether a pod is the part of NVIDIA's DRA driver that advertises a node's GPUs.

    The container decides, because the labels follow the name of the Helm release. The driver for
    ComputeDomains alone has another container. Like the device plugin's pod, it must also belong
    to a DaemonSet and mount the directory where drivers register with kubelet.
    """
    has_known_name = "gpus" in pod.container_names
    return has_known_name and pod.owner_kind == "DaemonSet" and pod.mounts_driver_sockets


def is_mps_daemon(pod: pod_object.Pod) -> bool:
    """Return whether a pod is an MPS control daemon that the driver runs for one ResourceClaim.

    The driver ends it after the last pod of the claim (dra-driver-nvidia-gpu,
    ``templates/mps-control-daemon.tmpl.yaml`` and ``MpsControlDaemon`` in ``sharing.go``).
    """
    return "mps-control-daemon" in pod.container_names and pod.owner_kind == "ReplicaSet"


def parse_slice(item: Mapping[str, Any]) -> Slice:
    """Parse a ResourceSlice; see ``api_values.as_cluster_error`` for its exceptions."""
    spec = item["spec"]
    # In v1beta1 they are one level down.
    bodies = {
        str(device["name"]): device.get("basic") or device for device in spec.get("devices") or ()
    }
    devices = {name: body.get("attributes") or {} for name, body in bodies.items()}
    taints = {name: _taints(body) for name, body in bodies.items()}
    return Slice(
        name=str(item["metadata"]["name"]),
        pool=str(spec["pool"]["name"]),
        generation=int(spec["pool"].get("generation") or 0),
        count=int(spec["pool"]["resourceSliceCount"]),
        uuids={name: _text(attributes, "uuid") for name, attributes in devices.items()},
        for_machines=frozenset(
            name
            for name, attributes in devices.items()
            if _text(attributes, "type") == _PASSTHROUGH
        ),
        taints={name: text for name, text in taints.items() if text},
        profiles={
            name: profile
            for name, attributes in devices.items()
            if (profile := _text(attributes, "profile"))
        },
    )


def _text(attributes: Mapping[str, Any], name: str) -> str:
    return str((attributes.get(name) or {}).get("string") or "")


def _taints(device: Mapping[str, Any]) -> str:
    # The effect "None" informs only: an Xid that is not fatal, a GPU without health checks.
    return ", ".join(
        f"{taint['key']}={taint['value']}" if taint.get("value") else str(taint["key"])
        for taint in device.get("taints") or ()
        if taint.get("effect") in _REPELLING
    )


def parse_claim(item: Mapping[str, Any]) -> frozenset[Device] | None:
    """Return the driver's devices that a ResourceClaim has; None if it is not allocated.

    Devices with admin access do not count: they are for monitors, and other pods may have them.
    """
    allocation = (item.get("status") or {}).get("allocation")
    if allocation is None:
        return None
    return frozenset(
        (str(result["pool"]), str(result["device"]))
        for result in (allocation.get("devices") or {}).get("results") or ()
        if result["driver"] == well_known.GPU_CLAIM_DRIVER and not result.get("adminAccess")
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The driver's devices that a ResourceClaim has, and the pods for which it is reserved."""

    namespace: str
    pods: Mapping[str, str]  # name of a pod, by its UID
    devices: frozenset[Device]


def parse_reservation(item: Mapping[str, Any]) -> Reservation:
    """Parse a ResourceClaim; see ``api_values.as_cluster_error`` for its exceptions."""
    return Reservation(
        namespace=str(item["metadata"]["namespace"]),
        pods={
            str(each["uid"]): str(each["name"])
            for each in (item.get("status") or {}).get("reservedFor") or ()
            if each.get("resource") == "pods"
        },
        devices=parse_claim(item) or frozenset(),
    )


def resolve(devices: Iterable[Device], slices: Iterable[Slice]) -> frozenset[str] | None:
    """Return the UUIDs of claimed devices; None if one is unknown."""
    uuids = {
        (resource_slice.pool, name): uuid
        for resource_slice in newest(slices)
        for name, uuid in resource_slice.uuids.items()
        if uuid
    }
    claimed = frozenset(devices)
    return frozenset(uuids[device] for device in claimed) if claimed <= uuids.keys() else None


def why_not_advertised(gpus: model.ObservedGpus, slices: Iterable[Slice]) -> str:
    """Explain how the slices of our node differ from its GPUs; empty if they match."""
    current = newest(slices)
    sizes = collections.Counter(resource_slice.pool for resource_slice in current)
    for resource_slice in current:
        if (size := sizes[resource_slice.pool]) < resource_slice.count:
            return f"the DRA driver has published {size} of {resource_slice.count} ResourceSlices"
    # The driver may have devices of unreachable GPUs too.
    is_partial = bool(gpus.unreachable)
    expected, _ = device_ids.expected_ids(gpus)
    listed = _container_uuids(current)
    uuids = frozenset(filter(None, listed))
    missing_uuid = listed.count("")
    if not missing_uuid and (uuids == expected or (is_partial and expected <= uuids)):
        return ""
    without = f", {missing_uuid} have no UUID (see DynamicMIG)" if missing_uuid else ""
    return (
        f"the DRA driver's ResourceSlices list {len(listed)} devices: "
        f"{len(uuids & expected)} exist, {len(expected)} are expected{without}"
    )


def destroyed_devices(gpus: model.ObservedGpus, slices: Iterable[Slice]) -> frozenset[str]:
    """Return the devices in the slices of our node that no GPU has; none if one is unreachable."""
    return device_ids.destroyed_ids(_container_uuids(newest(slices)), gpus, is_sliced=True)


def _container_uuids(slices: Iterable[Slice]) -> list[str]:
    """Return the UUIDs of the devices for containers; empty: the device does not exist yet."""
    return [
        uuid
        for resource_slice in slices
        for name, uuid in resource_slice.uuids.items()
        if name not in resource_slice.for_machines
    ]


def tainted_devices(slices: Iterable[Slice]) -> tuple[str, ...]:
    """Return the devices that a taint keeps pods away from, each with its taints.

    The driver taints devices after a fatal Xid (``gpu.nvidia.com/xid``) and after the loss of a
    GPU (``gpu.nvidia.com/gpu-lost``). It removes a taint only when it starts again, whether or not
    the GPU has recovered (``device_health.go``, dra-driver-nvidia-gpu#1455).
    """
    taints = {
        name: text
        for resource_slice in newest(slices)
        for name, text in resource_slice.taints.items()
    }
    return tuple(f"{name} ({text})" for name, text in sorted(taints.items()))


def why_not_served(layouts: Iterable[strategies.GpuLayout]) -> str:
    """Return why the driver exits over a layout; empty if it does not.

    It knows only devices that span their GPU instance, and fails to start with any other device
    (``getGpuInfo`` and ``getMigDevices`` of ``cmd/gpu-kubelet-plugin/nvlib.go``).
    """
    parts = {str(p) for gpu in layouts if gpu.is_enabled for p in gpu.profiles if not p.spans}
    return f"it knows no part of a GPU instance: {', '.join(sorted(parts))}" if parts else ""


def newest(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return the slices of the newest generation of their pool; others are stale."""
    slices = tuple(slices)
    generations: dict[str, int] = {}
    for resource_slice in slices:
        generations[resource_slice.pool] = max(
            resource_slice.generation, generations.get(resource_slice.pool, 0)
        )
    return tuple(
        resource_slice
        for resource_slice in slices
        if resource_slice.generation == generations[resource_slice.pool]
    )
