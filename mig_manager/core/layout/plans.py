"""The results of the commands plan, assert and apply: a plan, and the changes made.

``plan``, ``apply`` and ``assert`` use the same planner, so they agree on what "applied" means.
"""

import dataclasses
from collections.abc import Callable, Mapping

from mig_manager.core import gpu_processes, model, steps
from mig_manager.core.answers import gpu_answers, plan_answers
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import layouts, selection
from mig_manager.core.node import gpu_use
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import pod_object
from mig_manager.core.planner import planner, vgpus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of a layout."""

    layout: str
    gpus: model.ObservedGpus
    desired: Mapping[str, model.DesiredGpu]  # by UUID, only of selected GPUs
    plan: steps.Plan
    users: Mapping[str, tuple[str, ...]]
    """Pods by the UUID of the MIG device or GPU that they use, as far as known."""
    lenient_warnings: tuple[yaml_diagnostics.Diagnostic, ...] = ()
    """Problems that lenient parsing ignores."""
    origin: str = ""  # the origin of the layout; empty for a layout restored at boot

    @property
    def is_applied(self) -> bool:
        """Whether the layout is active."""
        return self.plan.is_empty

    @property
    def kept(self) -> int:
        """The number of the node's GPU instances that stay."""
        destroyed = self.plan.of(steps.DestroyGpuInstance)
        return sum(len(gpu.gpu_instances) for gpu in self.gpus) - len(destroyed)

    @property
    def unserved(self) -> Mapping[strategies.Strategy, str]:
        """MIG strategies with which the device plugin would exit, and why."""
        return strategies.refusals(strategies.gpu_layouts(self.gpus, self.desired))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that lenient parsing ignores, and effects on virtual machines."""
        remarks = (str(remark) for remark in self.lenient_warnings)
        return (*remarks, *vgpus.host_warnings(self.gpus, self.plan))

    @property
    def affected(self) -> frozenset[str]:
        """The ids of devices to be destroyed or changed."""
        return self.plan.affected_ids(self.gpus)

    @property
    def affected_pods(self) -> tuple[str, ...]:
        """Known pods that use devices to be destroyed."""
        return tuple(sorted({pod for uuid in self.affected for pod in self.users.get(uuid, ())}))

    def to_data(self) -> "plan_answers.Plan":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Plan",
            "layout": self.layout,
            "origin": self.origin or None,
            "is_applied": self.is_applied,
            "is_provisional": self.plan.is_provisional,
            "instances": {
                "destroyed": len(self.plan.of(steps.DestroyGpuInstance)),
                "created": len(self.plan.of(steps.CreateGpuInstance)),
                "kept": self.kept,
            },
            "destroyed_uuids": sorted(self.plan.destroyed_uuids),
            "affected_pods": list(self.affected_pods),
            "unserved_mig_strategies": {one.value: why for one, why in self.unserved.items()},
            "warnings": list(self.warnings),
            "gpus": [plan_answers.plan(gpu_plan) for gpu_plan in self.plan.gpus if gpu_plan.steps],
            "unreachable_gpus": [gpu_answers.unreachable(gpu) for gpu in self.gpus.unreachable],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What applying a layout changed."""

    executed: tuple[Planned, ...]  # empty if the layout was already active
    layout: str
    gpus: model.ObservedGpus
    """All GPUs of the node afterwards; the layout is not active on the unreachable ones."""
    lenient_warnings: tuple[yaml_diagnostics.Diagnostic, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether any plan was executed."""
        return bool(self.executed)

    def to_data(self) -> "plan_answers.Change":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Change",
            "layout": self.layout,
            "is_changed": self.is_changed,
            "warnings": [str(remark) for remark in self.lenient_warnings],
            "plans": [planned.to_data() for planned in self.executed],
            "unreachable_gpus": [gpu_answers.unreachable(gpu) for gpu in self.gpus.unreachable],
        }


def plan(
    observed: model.ObservedGpus,
    layout: layouts.Layout,
    *,
    is_mode_only: bool = False,
    usage: Callable[[], gpu_use.Usage] = gpu_use.Usage,
    processes: Callable[[], gpu_processes.Processes | None] = dict,
) -> Planned:
    """Plan a layout for observed GPUs; devices in use are destroyed last.

    Args:
        observed: The GPUs.
        layout: The layout.
        is_mode_only: Whether GPUs in the right MIG mode keep their instances.
        usage: Returns the pods with kubelet's allocations, as far as known.
        processes: Returns the processes that use each GPU, by its UUID; None: unknown. Both are
            called only if the plan destroys a device.

    Raises:
        LayoutError: The layout is impossible on these GPUs.
    """
    desired = changed = selection.select(layout, observed)
    cancelled: tuple[model.GpuSnapshot, ...] = ()
    if is_mode_only:
        kept = [
            gpu
            for gpu in observed
            if gpu.uuid in desired and gpu.current_mode is desired[gpu.uuid].mode
        ]
        as_now = {gpu.uuid: layouts.current(gpu, has_placements=True) for gpu in kept}
        changed = {
            uuid: model.DesiredGpu(mode=goal.mode)
            for uuid, goal in desired.items()
            if uuid not in as_now
        }
        desired = {**changed, **as_now}
        # A pending change to the other mode is cancelled.
        cancelled = tuple(
            dataclasses.replace(gpu.snapshot, pending_mode=gpu.current_mode)
            for gpu in kept
            if gpu.has_pending_mode
        )
    pods: Mapping[str, tuple[str, ...]] = {}
    with selection.located(layout, observed):
        changes = planner.plan(observed, changed)
        if changes.destroyed_uuids:
            pod_usage = usage()
            pods = pod_object.by_device(pod_usage.assigned or ())
            used_ids = gpu_processes.ids_in_use(observed, processes() or {})
            use = pod_usage.use_by_device(changes, observed, used_ids=used_ids)
            if use.keys() & changes.destroyed_uuids:
                changes = planner.plan(observed, changed, use=use)
        changes = planner.combine(changes, planner.restore(observed, cancelled))
    return Planned(
        layout=layout.name,
        gpus=observed,
        desired=desired,
        plan=changes,
        users=pods,
        lenient_warnings=selection.lenient_warnings(layout, observed),
        origin=layout.origin,
    )
