"""GPUs and plans as plain data, for JSON and YAML; the keys are a public contract."""

import dataclasses

from mig_manager.core import model, steps


def gpu(observed: model.Gpu) -> dict[str, object]:
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


def unreachable(gpu: model.UnreachableGpu) -> dict[str, object]:
    """Return a GPU that could not be observed; what is not known of it is null."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid or None,
        "pci_address": gpu.pci_address or None,
        "reason": gpu.reason.value,
        "code": gpu.code,
        "message": gpu.message,
    }


def gpu_plan(plan: steps.GpuPlan) -> dict[str, object]:
    """Return the plan of one GPU."""
    return {
        "index": plan.gpu_index,
        "uuid": plan.gpu_uuid,
        "changes_mode": plan.changes_mode,
        "needs_reset": plan.needs_reset,
        "is_provisional": plan.is_provisional,
        "steps": [_step_data(step) for step in plan.steps],
        "target": [
            {
                "profile": str(target.profile),
                "placement": str(target.placement),
                "compute_instances": [str(ci.profile) for ci in target.compute_instances],
                "kept": target.kept,
            }
            for target in plan.target
        ],
    }


_ACTIONS = {
    steps.DestroyComputeInstance: "destroy_compute_instance",
    steps.DestroyGpuInstance: "destroy_gpu_instance",
    steps.SetMode: "set_mode",
    steps.CreateGpuInstance: "create_gpu_instance",
    steps.CreateComputeInstance: "create_compute_instance",
}


def _step_data(step: steps.Step) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, model.Profile | model.Placement):
            return str(value)
        return value.value if isinstance(value, model.MigMode) else value

    names = [each.name for each in dataclasses.fields(step)]
    return {"action": _ACTIONS[type(step)]} | {
        name: plain(getattr(step, name))
        for name in names
        if name not in ("gpu_uuid", "profile_id")
    }
