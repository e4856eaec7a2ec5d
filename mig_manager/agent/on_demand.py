"""The rules for a custom layout on a node that a program repartitions.

It evicts no pod and waits for none: it is refused at once if anything uses what it would destroy.
Use is checked before anything is taken from the node, again once no pod can be scheduled to it,
again once no pod can get a device, and a last time in the session of the change.
"""

import dataclasses

from mig_manager import errors
from mig_manager.agent.pods import drain
from mig_manager.core import messages, ports
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster, gpu_use


@dataclasses.dataclass(frozen=True, slots=True)
class OnDemand:
    """Refuses what such a layout may not do; does nothing for other layouts and nodes."""

    deps: ports.Dependencies
    custom: customs.Custom | None  # what is requested; None: the layout is not custom

    @property
    def is_active(self) -> bool:
        """Whether the rules apply to this run."""
        return self.custom is not None and self.custom.is_on_demand

    def is_final(self, error: errors.MigManagerError) -> bool:
        """Check whether a run is not retried after an error that may pass.

        The program that chose the layout chooses another one if something uses what goes. A GPU
        client that does not stop in time says nothing about the layout.
        """
        is_client = isinstance(error, errors.NotReadyError)
        return self.is_active and error.reason is errors.Reason.IN_USE and not is_client

    def require_unused(self, affected: tuple[cluster.Pod, ...]) -> None:
        """Refuse a plan that affects pods, before anything is taken from the node.

        Raises:
            MigManagerError: IN_USE.
        """
        if self.is_active:
            _require_none(affected)

    def require_done(self, drainage: drain.Drain, usage: gpu_use.Usage) -> None:
        """Fail if a pod uses an affected device again; evict none.

        Raises:
            MigManagerError: As ``Drain.require_done``; IN_USE: pods use what the plan destroys.
        """
        if self.is_active:
            _require_none(drainage.remaining(usage))
        else:
            drainage.require_done(usage)

    def drain(
        self, drainage: drain.Drain, usage: gpu_use.Usage, request: ports.Cancellation
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
            "this custom layout is for a program and evicts no pod, and these pods use devices to "
            f"be removed, or may get them: {names}",
            reason=errors.Reason.IN_USE,
        )
