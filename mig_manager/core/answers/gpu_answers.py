"""GPUs and their processes in answers, and the answer of ``status``."""

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypedDict

from mig_manager.core import gpu_processes, model
from mig_manager.core.answers.values import MigMode, Reason


class Process(TypedDict):
    """A process that uses a GPU."""

    pid: int
    name: str  # its command line, as far as known
    gpu_instances: list[int]  # ids of the GPU instances that it uses; empty: the GPU itself
    pod_uid: str | None
    unit: str | None  # systemd unit


class UnreachableGpu(TypedDict):
    """A GPU that could not be observed; unknown facts are null."""

    index: int
    uuid: str | None
    pci_address: str | None
    reason: Reason
    code: int | None  # NVML code
    message: str


class _PublishedComputeInstance(TypedDict):
    profile: str
    placement: str | None  # compute slices, such as 0-1; null: the driver does not report it


class _ComputeInstance(_PublishedComputeInstance):
    id: int
    uuid: str | None  # UUID of the MIG device


class _InstanceFacts(TypedDict):
    profile: str
    profile_id: int
    placement: str  # memory slices, such as 4-7


class _PublishedGpuInstance(_InstanceFacts):
    compute_instances: list[_PublishedComputeInstance]


class _GpuInstance(_InstanceFacts):
    id: int
    compute_instances: list[_ComputeInstance]


_RecoveryAction = Annotated[str, "core.model.RecoveryAction"]


class _GpuFacts(TypedDict):
    index: int
    uuid: str
    name: str
    architecture: Annotated[str, "core.model.Architecture"]
    pci_address: str
    pci_device_id: str  # device, then vendor, as a device-filter has it
    pci_subsystem_id: str
    memory_mib: int
    mig_mode: MigMode | None  # null: the GPU has no MIG
    pending_mig_mode: MigMode | None  # the mode after the next reset
    mode_change_needs_reset: bool
    virtualization: Annotated[str, "core.model.Virtualization"]
    recovery_action: NotRequired[_RecoveryAction | None]  # null: not reported
    profiles: dict[str, list[str]] | None  # placements by profile; null: the driver lists none


class PublishedGpu(_GpuFacts):
    """A GPU as its agent publishes it."""

    gpu_instances: list[_PublishedGpuInstance]


class Gpu(_GpuFacts):
    """A GPU as the driver reports it."""

    gpu_instances: list[_GpuInstance]


class _StatusGpu(Gpu):
    processes: list[Process] | None  # processes that use it; null: unknown


class Status(TypedDict):
    """Answer of 'mig-manager status'."""

    kind: Literal["Status"]
    gpus: list[_StatusGpu]
    unreachable_gpus: list[UnreachableGpu]


LOCAL_IDS = frozenset({"id", "gpu_instance_id", "compute_instance_id"})


def gpu(observed: model.Gpu) -> Gpu:
    """Return an observed GPU."""
    return {
        "index": observed.index,
        "uuid": observed.uuid,
        "name": observed.name,
        "architecture": observed.architecture.value,
        "pci_address": observed.pci_address,
        "pci_device_id": f"0x{observed.pci_device_id:08X}",
        "pci_subsystem_id": f"0x{observed.pci_subsystem_id:08X}",
        "memory_mib": observed.memory_mib,
        "mig_mode": observed.current_mode.value if observed.current_mode else None,
        "pending_mig_mode": observed.pending_mode.value if observed.pending_mode else None,
        "mode_change_needs_reset": observed.mode_change_needs_reset,
        "virtualization": observed.virtualization.value,
        "recovery_action": observed.recovery_action.value if observed.recovery_action else None,
        "profiles": None
        if observed.profiles is None
        else {
            str(info.profile): [str(place) for place in info.placements]
            for info in observed.profiles
        },
        "gpu_instances": [
            {
                "id": gi.instance_id,
                "profile": str(gi.profile),
                "profile_id": gi.profile_id,
                "placement": str(gi.placement),
                "compute_instances": [
                    {
                        "id": ci.instance_id,
                        "profile": str(ci.profile),
                        "placement": str(ci.placement) if ci.placement else None,
                        "uuid": ci.uuid,
                    }
                    for ci in gi.compute_instances
                ],
            }
            for gi in observed.gpu_instances
        ],
    }


def status(gpus: model.ObservedGpus, processes: gpu_processes.Processes | None) -> Status:
    """Return the GPUs of a node, with their processes; None: unknown."""
    users_of = {
        uuid: [process(each) for each in users] for uuid, users in (processes or {}).items()
    }
    return {
        "kind": "Status",
        "gpus": [{**gpu(each), "processes": users_of.get(each.uuid)} for each in gpus],
        "unreachable_gpus": [unreachable(each) for each in gpus.unreachable],
    }


def unreachable(observed: model.UnreachableGpu) -> UnreachableGpu:
    """Return a GPU that could not be observed; unknown facts are null."""
    return {
        "index": observed.index,
        "uuid": observed.uuid or None,
        "pci_address": observed.pci_address or None,
        "reason": observed.reason.value,
        "code": observed.code,
        "message": observed.message,
    }


def process(user: gpu_processes.GpuProcess) -> Process:
    """Return a process that uses a GPU."""
    kind, _, name = user.owner.partition(" ")
    return {
        "pid": user.pid,
        "name": user.name,
        "gpu_instances": list(user.gpu_instances),
        "pod_uid": name if kind == "pod" else None,
        "unit": name if kind == "unit" else None,
    }


def without_ids(data: object) -> object:
    """Remove the driver's ids, which agents do not publish, from plain data of GPUs."""
    if isinstance(data, list):
        return [without_ids(item) for item in data]
    if isinstance(data, Mapping):
        return {
            key: without_ids(value)
            for key, value in data.items()
            if key not in LOCAL_IDS and not (key == "uuid" and value is None)
        }
    return data
