"""The ports of the GPUs: NVML, and the reset that NVIDIA's driver does on request."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mig_manager.core import model, steps


class Gpus(Protocol):
    """The GPUs of this node, through NVML; each call opens and closes one NVML session."""

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index, and the unreachable ones.

        Raises:
            HardwareError: NVML cannot be loaded, refuses, fails or does not answer in time, or no
                GPU is reachable.
        """

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of all GPUs in parallel, the steps of one GPU in order.

        Steps are idempotent. ``IN_USE`` is retried for a bounded time. A failure on one GPU does
        not stop the others; it is raised once they have finished.

        Args:
            plan: The steps.
            observed: The last observation; constant facts of GPUs that keep their mode are reused.

        Returns:
            The plan's GPUs afterwards, in its order. The message of an unreachable one names the
            step.

        Raises:
            OutdatedPlanError: Before the first step of a plan that requires idle GPUs: a GPU
                instance that it creates exists already.
            GpuInUseError: Before the first step of such a plan: processes use instances that it
                destroys.
            HardwareError: A step failed on a reachable GPU. The message names GPU, operation and
                code of each failure, for IN_USE also the processes that NVML lists.
        """


class RecordPersistence(Protocol):
    """Records which GPUs a reset has without persistence mode."""

    def __call__(self, uuids: Collection[str], *, is_on: bool) -> object:
        """Record that the persistence mode of GPUs will be switched off, or is on again."""


class GpuReset(Protocol):
    """Resets GPUs with a pending MIG mode, or with a fault."""

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        record_persistence: RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        """Reset exactly these GPUs, and wait until it is done.

        Without ``is_repair``, a GPU without a pending mode or with instances is refused.

        ``record_persistence`` is called before a persistence mode is switched off, and once it is
        on again.

        Raises:
            HostError: IN_USE: processes use a GPU; the message names the known ones.
                RESET_REQUIRED: the reset of a GPU was refused for another reason. REBOOT_REQUIRED:
                this machine cannot reset a GPU.
        """

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        """Switch persistence mode on; a failure is logged. Return whether it is on."""
