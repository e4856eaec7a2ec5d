"""The rules for a custom layout on a node that a program repartitions.

It evicts no pod and waits for none: it is refused at once if anything uses what it would destroy.
Use is checked before anything is taken from the node, again once no pod can be scheduled to it,
again once no pod can get a device, and a last time in the session of the change.
"""

import dataclasses

from mig_manager import errors
from mig_manager.agent import drain
from mig_manager.core import messages, model, ports, steps
from mig_manager.core.node import cluster


@dataclasses.dataclass(frozen=True, slots=True)
class OnDemand:
    """Refuses what such a layout may not do; does nothing for other layouts and nodes."""

    gpus: ports.Gpus
    _: dataclasses.KW_ONLY
    is_active: bool  # whether the rules apply to this run

    def require_unused(
        self, plan: steps.Plan, affected: tuple[cluster.Pod, ...], gpus: model.ObservedGpus
    ) -> None:
        """Refuse a plan before anything is taken from the node.

        Raises:
            HardwareError: IN_USE: processes use what the plan destroys; or NVML failed.
            MigManagerError: IN_USE: pods do.
        """
        if self.is_active:
            _require_none(affected)
            rehearsal = dataclasses.replace(plan, requires_idle=True, is_rehearsal=True)
            self.gpus.execute(rehearsal, gpus)

    def drain(
        self, drainage: drain.Drain, usage: drain.Usage, request: ports.Cancellation
    ) -> None:
        """Drain the node as its policy says, or refuse if a pod would have to leave.

        Raises:
            MigManagerError: As ``Drain.run``; IN_USE: pods use what the plan destroys.
            Superseded: Another layout is requested, or the agent stops.
        """
        if self.is_active:
            request.check()
            _require_none(drainage.remaining(usage))
        else:
            drainage.run(usage, request)

    def require_reboot_allowed(self) -> None:
        """Raise DrainError if the rules apply: a reboot ends every pod."""
        if self.is_active:
            raise errors.DrainError("a custom layout does not reboot an on-demand node")


def _require_none(affected: tuple[cluster.Pod, ...]) -> None:
    if affected:
        names = messages.listed([pod.key for pod in affected])
        raise errors.MigManagerError(
            "a custom layout evicts no pod of an on-demand node, and these pods use devices to "
            f"be removed, or may get them: {names}",
            reason=errors.Reason.IN_USE,
        )
