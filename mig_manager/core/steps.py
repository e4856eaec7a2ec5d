"""A plan as data: the steps of each GPU, in the order in which they run, and what they lead to."""

import dataclasses

from mig_manager.core import model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetComputeInstance:
    """A compute instance as it shall be: its profile and its span within the GPU instance."""

    profile: model.Profile
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetInstance:
    """A GPU instance as it shall be, with a place of its own."""

    profile: model.Profile
    profile_id: int
    placement: model.Placement
    compute_instances: tuple[TargetComputeInstance, ...]
    kept: bool
    """Whether a live GPU instance stays for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DestroyComputeInstance:
    """Destroy one compute instance; done when it is already gone."""

    gpu_uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: model.Profile
    uuid: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DestroyGpuInstance:
    """Destroy one GPU instance whose compute instances are gone; done when it is gone itself."""

    gpu_uuid: str
    gpu_instance_id: int
    profile: model.Profile
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """Switch MIG mode and prove that the switch took effect."""

    gpu_uuid: str
    mode: model.MigMode
    needs_reset: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateGpuInstance:
    """Create a GPU instance at a placement; done when the same one is already there."""

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
    | CreateGpuInstance
    | CreateComputeInstance
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The way of one GPU from what it has to what is wanted."""

    gpu_uuid: str
    gpu_index: int
    steps: tuple[Step, ...]
    """In the order in which they must run."""
    target: tuple[TargetInstance, ...]
    """All GPU instances afterwards, ascending by placement; empty while ``is_provisional``."""
    is_provisional: bool = False
    """The driver tells profiles only once MIG is on: run the steps, observe, plan again."""

    @property
    def changes_mode(self) -> bool:
        """Whether MIG mode is switched, which takes every user off this GPU."""
        return any(isinstance(step, SetMode) for step in self.steps)

    @property
    def needs_reset(self) -> bool:
        """Whether the switch of mode resets the GPU."""
        return any(isinstance(step, SetMode) and step.needs_reset for step in self.steps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The smallest change; GPUs that are right already do not occur in it."""

    gpus: tuple[GpuPlan, ...]
    requires_idle: bool = False
    """Whether the executor refuses it, before the first step, while a process uses an instance
    that it destroys or a GPU whose mode it changes, or where a GPU instance that it creates exists
    already."""

    @property
    def is_empty(self) -> bool:
        """Whether the layout is in force: the only definition of "applied"."""
        return not any(gpu.steps for gpu in self.gpus)

    @property
    def is_provisional(self) -> bool:
        """Whether another round of observing and planning is due after the steps."""
        return any(gpu.is_provisional for gpu in self.gpus)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, GPU by GPU."""
        return tuple(step for gpu in self.gpus for step in gpu.steps)

    @property
    def destroyed_uuids(self) -> frozenset[str]:
        """MIG device UUIDs that end, and the UUIDs of GPUs whose mode is switched."""
        return frozenset(
            [s.uuid for s in self.steps if isinstance(s, DestroyComputeInstance) and s.uuid]
            + [gpu.gpu_uuid for gpu in self.gpus if gpu.changes_mode]
        )


def described(step: Step) -> str:
    """Return a step in words, for people."""
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
        case CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case CreateComputeInstance():
            where = f"{step.placement} in the GPU instance at {step.gpu_instance_placement}"
            return f"create compute instance {step.profile} at {where}"
