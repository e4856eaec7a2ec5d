"""Plan a change of the GPUs, first as if no device were in use, then for who uses them."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import rolling_back, targets
from mig_manager.agent.pods import drain_scope
from mig_manager.core import messages, model, pod_rights, steps
from mig_manager.core.node import gpu_use
from mig_manager.core.node.daemons import client_table
from mig_manager.core.objects import pod_object
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_repair

_ON_DEMAND = (
    "an on-demand layout evicts no pod, but these pods use devices to be removed, or may get "
    "them: {}"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeInputs:
    """What every plan of a change starts from, and the first plan."""

    target: targets.Target
    gpus: model.ObservedGpus
    desired: Mapping[str, model.DesiredGpu]  # the target's GPUs by UUID
    restorable: model.Snapshots
    """GPUs outside the target as before an interrupted change, if that affects no pod."""
    extra_clients: tuple[client_table.ExtraClient, ...]  # the GPU clients that the owner lists
    services: tuple[str, ...]  # the host's services that the owner lists
    plan: steps.Plan  # as if no device were in use
    rights: drain_scope.DrainRights  # what every plan of the change may do with pods

    def scope(self, plan: steps.Plan) -> drain_scope.DrainScope:
        """Return which pods the drain for a plan affects."""
        is_whole_node = isinstance(self.rights, pod_rights.Evict) and self.rights.is_whole_node
        return drain_scope.DrainScope(
            affected=None if is_whole_node else plan.affected_ids(self.gpus),
            rights=self.rights,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A change of the GPUs that is planned for the use of the devices."""

    inputs: ChangeInputs
    usage: gpu_use.Usage  # who uses the devices; the drain may have brought it up to date
    use: Mapping[str, int]  # how much the plan avoids the loss of each device
    restores: model.Snapshots  # the plan restores all of ``inputs.restorable``, or none
    plan: steps.Plan

    @property
    def scope(self) -> drain_scope.DrainScope:
        """Which pods the drain for the plan affects."""
        return self.inputs.scope(self.plan)

    @property
    def affected_pods(self) -> pod_object.Pods:
        """The pods with devices that the change removes; the policy says what becomes of them."""
        return self.usage.users(self.scope.affected)

    def plan_rest(self, gpus: model.ObservedGpus) -> steps.Plan:
        """Plan what remains, for the same use of devices.

        A GPU lost during the change is verified only if the layout names it.

        Raises:
            LayoutError: The target is impossible on these GPUs.
        """
        return _plan(self.inputs.target, gpus, self.restores, self.use)


def plan_unused(
    attempt: attempts.Attempt, target: targets.Target, gpus: model.ObservedGpus
) -> ChangeInputs:
    """Plan the layout or the repair for the observed GPUs, as if no device were in use.

    Raises:
        ClusterError: The pods are not known that undoing an interrupted change would affect.
        ConfigError: A file of the owner cannot be read or is invalid.
        HardwareError: GPU_NEEDS_RESET: a GPU must be repaired first.
        LayoutError: The layout is impossible on these GPUs.
        MissingGpusError: The driver no longer lists a GPU of the verified layout.
    """
    extra_clients = attempt.deps.extra_clients()
    services = attempt.deps.service_names()
    missing = attempt.record.absent_gpus(gpus, attempt.deps.boot_id)
    if missing and not attempt.is_repair:
        message = outcomes.missing_message(attempt.status.title, missing)
        raise errors.MissingGpusError(message, missing)
    desired = target.select(gpus)
    others = tuple(gpu for gpu in attempt.journal.gpus.snapshots if gpu.uuid not in desired)
    restorable = others if others and rolling_back.can_roll_back(attempt, gpus, others) else ()
    plan = _plan(target, gpus, restorable)
    _require_repaired(attempt, gpus, plan)
    return ChangeInputs(
        target=target,
        gpus=gpus,
        desired=desired,
        restorable=restorable,
        extra_clients=extra_clients,
        services=services,
        plan=plan,
        rights=_rights(attempt, plan),
    )


def plan_change(
    attempt: attempts.Attempt,
    inputs: ChangeInputs,
    usage: gpu_use.Usage,
    *,
    used_ids: Iterable[str] = (),
) -> PlannedChange:
    """Plan for the use of devices, which the plan spares if it can.

    ``used_ids`` are devices that processes use.

    Raises:
        LayoutError: The layout is impossible on these GPUs.
    """
    use = usage.use_by_device(
        inputs.plan,
        inputs.gpus,
        used_ids=used_ids,
        now_s=attempt.deps.clock.unix_s(),
        within_s=attempt.settings.drain_timeout_s,
    )
    # Undoing an interrupted change evicts no pod that got a device since.
    undo = planner.restore(inputs.gpus, inputs.restorable)
    is_used = bool(usage.users(undo.affected_ids(inputs.gpus)))
    restores = () if is_used else inputs.restorable
    plan = _plan(inputs.target, inputs.gpus, restores, use)
    return PlannedChange(inputs=inputs, usage=usage, use=use, restores=restores, plan=plan)


def _plan(
    target: targets.Target,
    gpus: model.ObservedGpus,
    restores: model.Snapshots,
    use: Mapping[str, int] = types.MappingProxyType({}),
) -> steps.Plan:
    return planner.combine(target.plan(gpus, use=use), planner.restore(gpus, restores))


def _require_repaired(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, plan: steps.Plan
) -> None:
    """Refuse a layout on a GPU that the agent is to reset first: no new work runs before that."""
    if attempt.is_repair or not attempt.may_repair:
        return
    changed = {each.gpu_uuid for each in plan.gpus}
    faulty = [str(gpu) for gpu in gpus if gpu.uuid in changed and gpu_repair.is_possible(gpu)]
    if faulty:
        raise errors.HardwareError(
            f"no layout is applied before the repair of {messages.list_names(faulty)}",
            reason=reasons.Reason.GPU_NEEDS_RESET,
        )


def _rights(attempt: attempts.Attempt, plan: steps.Plan) -> drain_scope.DrainRights:
    """Return what the change may do with the pods that it affects; a refusal has its words."""
    title = attempt.status.title
    message: Callable[[str], str]
    match attempt.rights.pods:
        case pod_rights.Evict() | pod_rights.WaitOnly() as rights:
            return rights
        case pod_rights.OnDemand():
            return drain_scope.Refuse(reasons.Reason.IN_USE, _ON_DEMAND.format)
        case pod_rights.EvictedEnough(failed):
            message = functools.partial(
                outcomes.failed_changes_message, title, failed.count, failed.problem
            )
            return drain_scope.Refuse(failed.reason, message)
        case pod_rights.RestoreOnly():
            if plan.gpu_uuids != attempt.record.returned_gpus(plan.gpu_uuids):
                message = functools.partial(outcomes.drift_message, title)
                return drain_scope.Refuse(reasons.Reason.DRIFTED, message)
            # The layout has not drifted there.
            gpus = messages.list_names([*map(str, plan.gpus)])
            message = functools.partial(outcomes.returned_gpus_message, title, gpus)
            return drain_scope.Refuse(reasons.Reason.IN_USE, message)
