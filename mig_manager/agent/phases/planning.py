"""Plan a change of the GPUs before it is known who uses their devices."""

import dataclasses
import functools
from collections.abc import Mapping

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import recovery, targets
from mig_manager.agent.pods import drain_scope
from mig_manager.core import messages, model, steps
from mig_manager.core.node import client_table, clients, policies
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_repair

_ON_DEMAND = (
    "an on-demand layout evicts no pod, but these pods use devices to be removed, or may get "
    "them: {}"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """The target of a change, and the devices in use, which its plan spares if it can."""

    target: targets.Target
    restoring: model.Snapshots  # of ``ChangeInputs``; none if a pod uses what it would destroy
    use: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How much the loss of each device matters, as for ``planner.plan``."""

    def plan(self, gpus: model.ObservedGpus) -> steps.Plan:
        """Plan what remains, for the same use of devices.

        A GPU lost during the change is verified only if the layout names it.

        Raises:
            LayoutError: The target is impossible on these GPUs.
        """
        plan = self.target.plan(gpus, use=self.use)
        return planner.combine(plan, planner.restore(gpus, self.restoring))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeInputs:
    """What every plan of a change starts from."""

    gpus: model.ObservedGpus
    desired: Mapping[str, model.DesiredGpu]  # the target's GPUs by UUID
    restoring: model.Snapshots
    """The instances of GPUs outside the target from before an interrupted change."""
    extra_clients: tuple[client_table.ExtraClient, ...]  # the GPU clients that the owner lists
    services: tuple[str, ...]  # the host's services that the owner lists


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A change of the GPUs with its latest plan; the first is as if no device were in use."""

    inputs: ChangeInputs
    basis: PlanBasis
    plan: steps.Plan
    scope: drain_scope.DrainScope  # of the drain for the plan


def plan_change(
    attempt: attempts.Attempt, target: targets.Target, gpus: model.ObservedGpus
) -> PlannedChange:
    """Plan the layout or the repair for the observed GPUs.

    Raises:
        ConfigError: A file of the owner cannot be read or is invalid.
        HardwareError: GPU_NEEDS_RESET: a GPU must be repaired first.
        LayoutError: The layout is impossible on these GPUs.
        MissingGpusError: The driver no longer lists a GPU of the verified layout.
    """
    extra_clients = attempt.deps.extra_clients()
    services = attempt.deps.service_names()
    missing = attempt.recorder.record.absent_gpus(gpus, attempt.deps.boot_id)
    if missing and not attempt.request.repairs:
        message = outcomes.missing_message(attempt.status.title, missing)
        raise errors.MissingGpusError(message, missing)
    desired = target.select(gpus)
    others = tuple(
        gpu for gpu in attempt.recorder.journal.gpus.snapshot if gpu.uuid not in desired
    )
    restoring = others if others and recovery.can_roll_back(attempt, gpus, others) else ()
    basis = PlanBasis(target=target, restoring=restoring)
    plan = basis.plan(gpus)
    _require_repaired(attempt, gpus, plan)
    return PlannedChange(
        inputs=ChangeInputs(
            gpus=gpus,
            desired=desired,
            restoring=restoring,
            extra_clients=extra_clients,
            services=services,
        ),
        basis=basis,
        plan=plan,
        scope=scope_for(attempt, gpus, plan, _rights(attempt, plan)),
    )


def _require_repaired(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, plan: steps.Plan
) -> None:
    """Refuse a layout on a GPU that the agent is to reset first: no new work runs before that."""
    if attempt.request.repairs or not attempt.may_repair:
        return
    changed = {each.gpu_uuid for each in plan.gpus}
    faulty = [str(gpu) for gpu in gpus if gpu.uuid in changed and gpu_repair.is_possible(gpu)]
    if faulty:
        raise errors.HardwareError(
            f"no layout is applied before the repair of {messages.list_names(faulty)}",
            reason=reasons.Reason.GPU_NEEDS_RESET,
        )


def _rights(attempt: attempts.Attempt, plan: steps.Plan) -> drain_scope.DrainRights:
    """Return whether the change may evict."""
    if attempt.only_restores:
        title = attempt.status.title
        if plan.gpu_uuids == attempt.recorder.record.returned_gpus(plan.gpu_uuids):
            # The layout has not drifted there.
            gpus = messages.list_names([*map(str, plan.gpus)])
            message = functools.partial(outcomes.owed_message, title, gpus)
            return drain_scope.Refuse(reasons.Reason.IN_USE, message)
        message = functools.partial(outcomes.drift_message, title)
        return drain_scope.Refuse(reasons.Reason.DRIFTED, message)
    if attempt.never_evicts:
        return drain_scope.Refuse(reasons.Reason.IN_USE, _ON_DEMAND.format)
    failed = attempt.recorder.record.failed_changes
    if failed and not failed.may_evict(attempt.status.config_hash, attempt.deps.boot_id):
        message = functools.partial(
            outcomes.failed_changes_message, attempt.status.title, failed.count, failed.problem
        )
        return drain_scope.Refuse(failed.reason, message)
    if attempt.limits.policy.drain is policies.DrainPolicy.NONE:
        return drain_scope.WaitOnly("--drain-policy none evicts no pod")
    return drain_scope.Evict()


def scope_for(
    attempt: attempts.Attempt,
    gpus: model.ObservedGpus,
    plan: steps.Plan,
    rights: drain_scope.DrainRights,
) -> drain_scope.DrainScope:
    """Return which pods the drain for a plan affects."""
    may_evict = isinstance(rights, drain_scope.Evict)
    is_whole_node = may_evict and attempt.limits.policy.drain is policies.DrainPolicy.NODE
    return drain_scope.DrainScope(
        affected=None if is_whole_node else clients.affected_ids(plan, gpus),
        rights=rights,
    )
