"""MIG modes that may wait: asked for, and left to a later reset or reboot.

So does NVIDIA's unit for bare metal: it asks for the mode first (``apply --mode-only
--skip-reset``), then looks whether the machine can be reset or has to be rebooted.
"""

from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, ports, steps


class Lenient:
    """GPUs on which it is no failure that a mode waits; implements ``ports.Gpus``."""

    def __init__(self, gpus: ports.Gpus) -> None:
        self._gpus = gpus

    def observe(self) -> model.ObservedGpus:
        """Return every GPU; see the port."""
        return self._gpus.observe()

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps; see the port. Whether modes wait is told by the GPUs returned.

        Raises:
            HardwareError: A step failed for another reason.
        """
        try:
            return self._gpus.execute(plan, seen)
        except errors.HardwareError as error:
            if not error.reason.means_mode_waits:
                raise
        return self._gpus.observe().only(each.gpu_uuid for each in plan.gpus)


def for_their_mode(
    gpus: Iterable[model.Gpu], wanted: Mapping[str, model.DesiredGpu]
) -> tuple[model.Gpu, ...]:
    """Return the GPUs whose pending mode is the one that is wanted of them."""
    return tuple(
        gpu
        for gpu in gpus
        if gpu.uuid in wanted
        and gpu.has_pending_mode
        and gpu.pending_mode is wanted[gpu.uuid].mode
    )


def without(plan: steps.Plan, gpus: Iterable[model.Gpu]) -> steps.Plan:
    """Return a plan without what these GPUs need."""
    left = {gpu.uuid for gpu in gpus}
    return steps.Plan(gpus=tuple(each for each in plan.gpus if each.gpu_uuid not in left))
