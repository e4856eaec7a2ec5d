"""A plan as data: the steps of each GPU, in order, and the instances afterwards."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mig_manager.core import model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetComputeInstance:
    """A compute instance after the plan."""

    profile: model.Profile
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetInstance:
    """A GPU instance after the plan."""

    profile: model.Profile
    profile_id: int
    placement: model.Placement
    compute_instances: tuple[TargetComputeInstance, ...]
    kept: bool  # whether it exists already


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DestroyComputeInstance:
    """Destroy one compute instance, if it exists."""

    gpu_uuid: str
    gpu_instance_id: int
    within: model.Placement  # place of the GPU instance; plans in JSON name it by its id alone
    compute_instance_id: int
    profile: model.Profile
    uuid: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DestroyGpuInstance:
    """Destroy one GPU instance without compute instances, if it exists."""

    gpu_uuid: str
    gpu_instance_id: int
    profile: model.Profile
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """Change MIG mode and verify that the change took effect."""

    gpu_uuid: str
    mode: model.MigMode
    needs_reset: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Reset the GPU, which removes its instances; the transaction does it after other steps."""

    gpu_uuid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateGpuInstance:
    """Create a GPU instance at a placement, unless it exists."""

    gpu_uuid: str
    profile: model.Profile
    profile_id: int
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateComputeInstance:
    """Create a compute instance in the GPU instance at ``gpu_instance_placement``."""

    gpu_uuid: str
    gpu_instance_placement: model.Placement
    profile: model.Profile
    placement: model.Placement


Step = (
    DestroyComputeInstance
    | DestroyGpuInstance
    | SetMode
    | Reset
    | CreateGpuInstance
    | CreateComputeInstance
)
_Kind = TypeVar("_Kind", bound=Step)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The change of one GPU."""

    gpu_uuid: str
    gpu_index: int
    steps: tuple[Step, ...]  # in order
    target: tuple[TargetInstance, ...]
    """All GPU instances afterwards, ascending by placement; empty while ``is_provisional``."""
    is_provisional: bool = False
    """The driver lists profiles only with MIG enabled: run the steps, observe, plan again."""

    def __str__(self) -> str:
        return f"GPU {self.gpu_index} ({self.gpu_uuid})"

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Return the steps of one kind."""
        return tuple(step for step in self.steps if isinstance(step, kind))

    @property
    def instances(self) -> tuple[model.GpuInstance, ...]:
        """The target as observed instances, without UUIDs; their ids are positions."""
        return tuple(
            model.GpuInstance(
                instance_id=number,
                profile=each.profile,
                profile_id=each.profile_id,
                placement=each.placement,
                compute_instances=tuple(
                    model.ComputeInstance(
                        instance_id=inside, profile=ci.profile, placement=ci.placement, uuid=None
                    )
                    for inside, ci in enumerate(each.compute_instances)
                ),
            )
            for number, each in enumerate(self.target)
        )

    @property
    def takes_whole_gpu(self) -> bool:
        """Whether MIG mode changes or a repair resets the GPU, which requires an idle GPU."""
        return self.is_repair or bool(self.of(SetMode))

    @property
    def destroys(self) -> bool:
        """Whether a GPU instance or compute instance is destroyed."""
        return bool(self.of(DestroyGpuInstance) or self.of(DestroyComputeInstance))

    @property
    def is_repair(self) -> bool:
        """Whether the GPU is reset because it has a fault."""
        return bool(self.of(Reset))

    @property
    def needs_reset(self) -> bool:
        """Whether a repair or the change of MIG mode resets the GPU."""
        return self.is_repair or any(step.needs_reset for step in self.of(SetMode))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The smallest change; GPUs that need no step are not part of it."""

    gpus: tuple[GpuPlan, ...]
    requires_idle: bool = False
    """Whether the executor checks, before the first step, that no process is ``blocking``, and
    that no GPU instance or compute instance to create exists."""
    in_use_timeout_s: float | None = None
    """How long the executor retries a step that the driver refuses as in use; at most, and for
    None, the executor's own limit."""

    @property
    def is_empty(self) -> bool:
        """Whether the layout is active: the only definition of "applied"."""
        return not any(gpu.steps for gpu in self.gpus)

    @property
    def is_provisional(self) -> bool:
        """Whether the GPUs must be observed and planned again after the steps."""
        return any(gpu.is_provisional for gpu in self.gpus)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, GPU by GPU."""
        return tuple(step for gpu in self.gpus for step in gpu.steps)

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Return the steps of one kind, GPU by GPU."""
        return tuple(step for gpu in self.gpus for step in gpu.of(kind))

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """UUIDs of the GPUs with steps."""
        return frozenset(gpu.gpu_uuid for gpu in self.gpus)

    @property
    def destroyed_uuids(self) -> frozenset[str]:
        """UUIDs of MIG devices that are destroyed, and of GPUs whose mode changes."""
        return frozenset(
            [step.uuid for step in self.of(DestroyComputeInstance) if step.uuid]
            + [gpu.gpu_uuid for gpu in self.gpus if gpu.takes_whole_gpu]
        )


def describe(step: Step) -> str:
    """Describe a step for people."""
    match step:
        case DestroyComputeInstance():
            where = f"instance {step.gpu_instance_id}/{step.compute_instance_id}"
            return f"destroy compute instance {step.profile} ({where}, {step.uuid or 'no UUID'})"
        case DestroyGpuInstance():
            where = f"instance {step.gpu_instance_id}"
            return f"destroy GPU instance {step.profile} at {step.placement} ({where})"
        case SetMode():
            how = ", which resets the GPU" if step.needs_reset else ""
            return f"switch MIG mode to {step.mode.value}{how}"
        case Reset():
            return "reset the GPU"
        case CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case CreateComputeInstance():
            where = f"{step.placement} in the GPU instance at {step.gpu_instance_placement}"
            return f"create compute instance {step.profile} at {where}"


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
            instances = user.compute_instances
            for gi in gpu.gpu_instances:
                for ci in gi.compute_instances if gi.instance_id in user.gpu_instances else ():
                    if ci.uuid and (
                        not instances or (gi.instance_id, ci.instance_id) in instances
                    ):
                        yield ci.uuid


def blocking(plan: GpuPlan, users: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return the users of a GPU that use instances to be destroyed, or are ``keeping_out``.

    A change of MIG mode affects every process with the GPU open, except ``RELEASING_DAEMONS``.
    A process that uses ``/dev/dri``, and no known instance, may use any ``+gfx`` instance.
    """
    users = tuple(users)
    if plan.takes_whole_gpu:
        return tuple(user for user in users if not is_releasing_daemon(user))
    kept_out_by = keeping_out(plan, users)
    gone, gone_inside = plan.of(DestroyGpuInstance), plan.of(DestroyComputeInstance)
    gpu_instances = {step.gpu_instance_id for step in gone}
    compute_instances = {(step.gpu_instance_id, step.compute_instance_id) for step in gone_inside}
    profiles = {step.profile for step in gone} | {step.profile for step in gone_inside}
    destroys_gfx = any("gfx" in profile.attributes for profile in profiles)
    return tuple(
        user
        for user in users
        if gpu_instances.intersection(user.gpu_instances)
        or (destroys_gfx and user.has_drm_node and not user.gpu_instances)
        or compute_instances.intersection(user.compute_instances)
        or user in kept_out_by
    )


def keeping_out(plan: GpuPlan, users: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return the users that make the driver refuse the first GPU instance of an empty GPU.

    They run on the GPU itself, outside any instance. Destroy nothing then: the driver would refuse
    the rollback as well.
    """
    creates = plan.of(CreateGpuInstance)
    if plan.takes_whole_gpu or not creates or any(target.kept for target in plan.target):
        return ()
    return tuple(user for user in users if user.is_running and not user.gpu_instances)
