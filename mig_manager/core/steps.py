"""A plan as data: the steps of each GPU, in order, and the instances afterwards."""

import dataclasses
from collections.abc import Iterable
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
    is_kept: bool  # whether it exists already


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DestroyComputeInstance:
    """Destroy one compute instance, if it exists."""

    gpu_uuid: str
    gpu_instance_id: int
    within: model.Placement  # of the GPU instance; plans in JSON name it by its id alone
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
    def resets_gpu(self) -> bool:
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

    @property
    def destroys_instances(self) -> bool:
        """Whether it destroys an instance or takes a whole GPU."""
        return any(gpu.destroys or gpu.takes_whole_gpu for gpu in self.gpus)

    def affected_ids(self, gpus: Iterable[model.Gpu]) -> frozenset[str]:
        """Return the ids of devices that it destroys or changes, of the observed GPUs.

        That includes a whole GPU if an instance on it is destroyed or its mode changes, because
        ``mig.strategy=none`` allocates MIG-enabled GPUs whole.
        """
        mig_uuids = {gpu.uuid: gpu.mig_uuids for gpu in gpus}
        ids: set[str] = set(self.destroyed_uuids)
        for gpu in self.gpus:
            if gpu.destroys or gpu.takes_whole_gpu:
                ids.add(gpu.gpu_uuid)
            if gpu.takes_whole_gpu:
                ids.update(mig_uuids[gpu.gpu_uuid])
        return frozenset(ids)


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
            return f"change MIG mode to {step.mode.value}{how}"
        case Reset():
            return "reset the GPU"
        case CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case CreateComputeInstance():
            where = f"{step.placement} in the GPU instance at {step.gpu_instance_placement}"
            return f"create compute instance {step.profile} at {where}"
