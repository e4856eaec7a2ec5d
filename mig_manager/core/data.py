"""GPUs and plans as plain data, for JSON and YAML; the keys are a public contract."""

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
        "gpu_instances": [_instance_data(gi) for gi in observed.gpu_instances],
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


def _instance_data(gi: model.GpuInstance) -> dict[str, object]:
    return {
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


def _step_data(step: steps.Step) -> dict[str, object]:
    match step:
        case steps.DestroyComputeInstance():
            return {
                "action": "destroy_compute_instance",
                "gpu_instance_id": step.gpu_instance_id,
                "compute_instance_id": step.compute_instance_id,
                "profile": str(step.profile),
                "uuid": step.uuid,
            }
        case steps.DestroyGpuInstance():
            return {
                "action": "destroy_gpu_instance",
                "gpu_instance_id": step.gpu_instance_id,
                "profile": str(step.profile),
                "placement": str(step.placement),
            }
        case steps.SetMode():
            return {
                "action": "set_mode",
                "mode": step.mode.value,
                "needs_reset": step.needs_reset,
            }
        case steps.CreateGpuInstance():
            return {
                "action": "create_gpu_instance",
                "profile": str(step.profile),
                "placement": str(step.placement),
            }
        case steps.CreateComputeInstance():
            return {
                "action": "create_compute_instance",
                "gpu_instance_placement": str(step.gpu_instance_placement),
                "profile": str(step.profile),
                "placement": str(step.placement),
            }
