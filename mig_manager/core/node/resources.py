"""GPUs as a scheduler sees them: extended resources with ``mig.strategy=mixed``."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from mig_manager.core import model, steps
from mig_manager.core.node import cluster

GPU = f"{cluster.RESOURCE_PREFIX}gpu"
"""A whole GPU."""
_MIG_PREFIX = f"{cluster.RESOURCE_PREFIX}mig-"


def of_profile(profile: model.Profile) -> str | None:
    """Return the resource name of a MIG profile.

    None for a profile that takes a part of its GPU instance: NVIDIA's device plugin has no name
    for such devices, and ends when it meets one.
    """
    # Resource names may not contain a plus sign.
    return f"{_MIG_PREFIX}{profile}".replace("+", ".") if profile.spans else None


def counts(gpus: Iterable[model.Gpu]) -> dict[str, int]:
    """Return how many devices of each resource there are; devices without a name are left out."""
    found: collections.Counter[str] = collections.Counter()
    for gpu in gpus:
        if gpu.current_mode is not model.MigMode.ENABLED:
            found[GPU] += 1
            continue
        names = (
            of_profile(device.profile)
            for instance in gpu.gpu_instances
            for device in instance.compute_instances
            if device.uuid
        )
        found.update(name for name in names if name)
    return dict(found)


def is_device(name: str) -> bool:
    """Return whether a resource stands for GPUs or MIG devices."""
    return name == GPU or name.startswith(_MIG_PREFIX)


_SHARED = ".shared"
"""What the device plugin appends to the name of a resource that several may hold."""
_WITHOUT_MIG_NAMES = frozenset({"single", "none"})
"""Strategies by which MIG devices, or GPUs with them, go by the name of whole GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of device of a node, and who asks for it."""

    resource: str
    """Such as ``nvidia.com/mig-1g.5gb``."""
    count: int
    """Devices of this kind that the node has."""
    pods: Mapping[str, int]
    """How many each pod asks for, by ``namespace/name``."""

    @property
    def asked(self) -> int:
        """How many are asked for in all."""
        return sum(self.pods.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Devices of one kind that end, and what that means to those who ask for it."""

    kind: Kind
    ending: int

    @property
    def is_total(self) -> bool:
        """Whether every holder has to leave."""
        return self.ending >= self.kind.count

    @property
    def least(self) -> int:
        """How many held devices end even if those nobody holds end first."""
        return max(0, self.kind.asked - max(0, self.kind.count - self.ending))


def kinds(
    gpus: Iterable[model.Gpu], pods: Iterable[cluster.Pod], *, strategy: str
) -> tuple[Kind, ...]:
    """Return the kinds of devices of a node, most slices first, whole GPUs last.

    Args:
        gpus: Of the node.
        pods: Of the node; those that have ended hold nothing.
        strategy: The device plugin's ``mig.strategy``; empty when it is not known.
    """
    counts: collections.Counter[str] = collections.Counter()
    for gpu in gpus:
        counts.update(_devices(gpu, strategy))
    asking: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for pod in pods:
        for name, amount in ({} if pod.is_finished else pod.gpu_resources).items():
            resource = name.removesuffix(_SHARED)
            if is_device(resource) and amount > 0:
                asking[resource][pod.key] = asking[resource].get(pod.key, 0) + amount
    names = sorted(counts.keys() | asking.keys(), key=lambda name: (name == GPU, name))
    return tuple(
        Kind(resource=name, count=counts[name], pods=dict(sorted(asking[name].items())))
        for name in names
    )


def losses(
    plan: steps.Plan,
    gpus: Iterable[model.Gpu],
    pods: Iterable[cluster.Pod],
    *,
    strategy: str,
) -> tuple[Loss, ...]:
    """Return the kinds of devices that a plan ends and that somebody asks for.

    Args:
        plan: What would be done.
        gpus: Of the node, as they are before it.
        pods: Of the node.
        strategy: As for ``kinds``.
    """
    known = tuple(gpus)
    by_uuid = {gpu.uuid: gpu for gpu in known}
    ending: collections.Counter[str] = collections.Counter()
    for gpu_plan in plan.gpus:
        ending.update(_ending(gpu_plan, by_uuid[gpu_plan.gpu_uuid], strategy))
    return tuple(
        Loss(kind=kind, ending=ending[kind.resource])
        for kind in kinds(known, pods, strategy=strategy)
        if ending[kind.resource] and kind.pods
    )


def _devices(gpu: model.Gpu, strategy: str) -> Iterable[str]:
    if gpu.current_mode is not model.MigMode.ENABLED or strategy == "none":
        return [GPU]
    inside = [ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances]
    return _names(inside, strategy)


def _ending(gpu_plan: steps.GpuPlan, gpu: model.Gpu, strategy: str) -> Iterable[str]:
    if gpu_plan.changes_mode or (strategy == "none" and gpu_plan.steps):
        return _devices(gpu, strategy)
    return _names(
        [s.profile for s in gpu_plan.steps if isinstance(s, steps.DestroyComputeInstance)],
        strategy,
    )


def _names(profiles: Iterable[model.Profile], strategy: str) -> list[str]:
    if strategy in _WITHOUT_MIG_NAMES:
        return [GPU for _ in profiles]
    return [name for name in map(of_profile, profiles) if name]
