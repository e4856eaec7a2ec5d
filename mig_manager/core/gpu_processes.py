"""The processes that use GPUs, and which of them the steps of a plan affect."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model, steps

RELEASING_DAEMONS = ("nvidia-persiste", "nv-fabricmanage")
"""Daemons that have every GPU open and do not block a reset, by the kernel's 15 letters of a name.

The first releases the GPU when nvidia-smi asks (gpu-operator#118). Without the second, a GPU
behind an NVSwitch could not be reset alone (``nvidia-smi(1)``)."""

_COMM = 15


def program_name(command: str) -> str:
    """Return the bare name of a command line's program, or an empty text."""
    return command.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU, according to NVML's lists, its open files, or both."""

    pid: int
    name: str
    owner: str  # ``pod UID``, or ``unit NAME`` of a service or login session; empty if unknown
    gpu_instances: tuple[int, ...]
    """Ids of the GPU instances that it uses; empty if it uses the GPU itself."""
    compute_instances: tuple[tuple[int, int], ...] = ()
    """Ids of GPU instance and compute instance, as far as known."""
    is_running: bool = False
    """Whether NVML lists it because it computes or draws, besides having files open."""
    has_drm_node: bool = False
    """Whether it has a node of the GPU in ``/dev/dri`` open; such a node is never an
    instance's."""

    def __str__(self) -> str:
        where = ", ".join(f"GPU instance {each}" for each in self.gpu_instances)
        details = ", ".join(filter(None, (f"pid {self.pid}", where, self.owner)))
        return f"{self.name} ({details})"

    def may_use(self, gpu_instance_id: int, compute_instance_id: int) -> bool:
        """Return whether it uses a compute instance, or an unknown one of that GPU instance."""
        inside = {ci for gi, ci in self.compute_instances if gi == gpu_instance_id}
        if inside:
            return compute_instance_id in inside
        return gpu_instance_id in self.gpu_instances


Processes = Mapping[str, Sequence[GpuProcess]]
"""The processes that use GPUs, by UUID; a GPU that does not answer is missing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Versions and GPU processes, as the driver reports them.

    Defined here because an idle agent receives it and must not load NVML.
    """

    driver_version: str
    nvml_version: str
    processes: tuple[tuple[str, tuple[GpuProcess, ...]], ...]
    """UUID of each GPU and the processes that use it, ascending by pid."""


def is_releasing_daemon(user: GpuProcess) -> bool:
    """Return whether a process is among ``RELEASING_DAEMONS``."""
    return user.name[:_COMM] in RELEASING_DAEMONS


def ids_in_use(
    gpus: Iterable[model.Gpu], processes: Mapping[str, Iterable[GpuProcess]]
) -> Iterator[str]:
    """Yield the UUIDs of MIG devices that processes use, or may use."""
    for gpu in gpus:
        for user in processes.get(gpu.uuid, ()):
            for gi in gpu.gpu_instances:
                for ci in gi.compute_instances:
                    if ci.uuid and user.may_use(gi.instance_id, ci.instance_id):
                        yield ci.uuid


def blocking(plan: steps.GpuPlan, users: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return the users of a GPU that use instances to be destroyed, or are ``keeping_out``.

    A change of MIG mode affects every process with the GPU open, except ``RELEASING_DAEMONS``.
    A process that uses ``/dev/dri``, and no known instance, may use any ``+gfx`` instance.
    """
    users = tuple(users)
    if plan.takes_whole_gpu:
        return tuple(user for user in users if not is_releasing_daemon(user))
    kept_out_by = keeping_out(plan, users)
    destroyed = plan.of(steps.DestroyGpuInstance)
    destroyed_inside = plan.of(steps.DestroyComputeInstance)
    gpu_instances = {step.gpu_instance_id for step in destroyed}
    profiles = {step.profile for step in destroyed} | {step.profile for step in destroyed_inside}
    destroys_gfx = any("gfx" in profile.attributes for profile in profiles)
    return tuple(
        user
        for user in users
        if gpu_instances.intersection(user.gpu_instances)
        or (destroys_gfx and user.has_drm_node and not user.gpu_instances)
        or any(
            user.may_use(step.gpu_instance_id, step.compute_instance_id)
            for step in destroyed_inside
        )
        or user in kept_out_by
    )


def keeping_out(plan: steps.GpuPlan, users: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return the users that make the driver refuse the first GPU instance of an empty GPU.

    They run on the GPU itself, outside any instance. Destroy nothing then: the driver would refuse
    the rollback as well.
    """
    creates = plan.of(steps.CreateGpuInstance)
    if plan.takes_whole_gpu or not creates or any(target.is_kept for target in plan.target):
        return ()
    return tuple(user for user in users if user.is_running and not user.gpu_instances)
