"""GPUs, their processes and plans in the answers of ``-o json``; see ``answers``."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mig_manager.core import gpu_processes, model, steps

if TYPE_CHECKING:
    from mig_manager.core import answers

LOCAL_IDS = frozenset({"id", "gpu_instance_id", "compute_instance_id"})


def gpu(observed: model.Gpu) -> "answers.Gpu":
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


def unreachable(observed: model.UnreachableGpu) -> "answers.UnreachableGpu":
    """Return a GPU that could not be observed; unknown facts are null."""
    return {
        "index": observed.index,
        "uuid": observed.uuid or None,
        "pci_address": observed.pci_address or None,
        "reason": observed.reason.value,
        "code": observed.code,
        "message": observed.message,
    }


def process(user: gpu_processes.GpuProcess) -> "answers.Process":
    """Return a process that uses a GPU."""
    kind, _, name = user.owner.partition(" ")
    return {
        "pid": user.pid,
        "name": user.name,
        "gpu_instances": list(user.gpu_instances),
        "pod_uid": name if kind == "pod" else None,
        "unit": name if kind == "unit" else None,
    }


def plan(planned: steps.GpuPlan) -> "answers.GpuPlan":
    """Return the plan of one GPU."""
    return {
        "index": planned.gpu_index,
        "uuid": planned.gpu_uuid,
        "changes_mode": bool(planned.of(steps.SetMode)),
        "needs_reset": planned.needs_reset,
        "is_provisional": planned.is_provisional,
        "steps": [_step_data(step) for step in planned.steps],
        "target": [
            {
                "profile": str(target.profile),
                "placement": str(target.placement),
                "compute_instances": [str(ci.profile) for ci in target.compute_instances],
                "kept": target.is_kept,
            }
            for target in planned.target
        ],
    }


ACTIONS = {
    steps.DestroyComputeInstance: "destroy-compute-instance",
    steps.DestroyGpuInstance: "destroy-gpu-instance",
    steps.SetMode: "set-mode",
    steps.Reset: "reset-gpu",
    steps.CreateGpuInstance: "create-gpu-instance",
    steps.CreateComputeInstance: "create-compute-instance",
}


def _step_data(step: steps.Step) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, model.Profile | model.Placement):
            return str(value)
        return value.value if isinstance(value, model.MigMode) else value

    return {"action": ACTIONS[type(step)]} | {
        each.name: plain(getattr(step, each.name))
        for each in dataclasses.fields(step)
        if each.name not in ("gpu_uuid", "profile_id", "within")
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
