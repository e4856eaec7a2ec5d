"""Processes that use a GPU, and which of them block a plan."""

import dataclasses
from collections.abc import Iterable

from mig_manager.core import steps

RELEASING_DAEMONS = ("nvidia-persiste", "nv-fabricmanage")
"""Daemons, by the 15 letters that the kernel keeps of a name, which have every GPU open and are
do not block a reset: the first releases it when nvidia-smi asks (gpu-operator#118), and
without the second a GPU behind an NVSwitch could not be reset alone (``nvidia-smi(1)``)."""

_COMM = 15


def program(command: str) -> str:
    """Return the program's bare name of a command line; empty when it has none."""
    return command.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU, by NVML's lists, by its open files, or both."""

    pid: int
    name: str
    home: str
    """``pod UID`` or ``unit NAME.service``; empty if unknown."""
    gpu_instances: tuple[int, ...]
    """Ids of the GPU instances that it uses; empty if it uses the GPU itself."""
    compute_instances: tuple[tuple[int, int], ...] = ()
    """Ids of GPU instance and compute instance, as far as they are known."""

    def __str__(self) -> str:
        where = ", ".join(f"GPU instance {each}" for each in self.gpu_instances)
        details = ", ".join(filter(None, (f"pid {self.pid}", where, self.home)))
        return f"{self.name} ({details})"

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        kind, _, name = self.home.partition(" ")
        return {
            "pid": self.pid,
            "name": self.name,
            "gpu_instances": list(self.gpu_instances),
            "pod_uid": name if kind == "pod" else None,
            "unit": name if kind == "unit" else None,
        }


def blocking(plan: steps.GpuPlan, users: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return the users of a GPU that use what its plan destroys.

    A change of MIG mode affects every process with the GPU open, except ``RELEASING_DAEMONS``.
    """
    if plan.changes_mode:
        return tuple(user for user in users if user.name[:_COMM] not in RELEASING_DAEMONS)
    gpu_instances = {
        step.gpu_instance_id for step in plan.steps if isinstance(step, steps.DestroyGpuInstance)
    }
    compute_instances = {
        (step.gpu_instance_id, step.compute_instance_id)
        for step in plan.steps
        if isinstance(step, steps.DestroyComputeInstance)
    }
    return tuple(
        user
        for user in users
        if gpu_instances.intersection(user.gpu_instances)
        or compute_instances.intersection(user.compute_instances)
    )
