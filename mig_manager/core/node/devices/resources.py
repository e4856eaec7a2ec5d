"""Extended resources of a node: their names, its devices, and the pods that request them.

The API shows what a pod requests and where it runs, but not which device it got: only kubelet
knows. So the API gives certainty only if all devices of a kind are in use, or all are destroyed.
"""

import collections
import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import model, profile_name, steps
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import pod_object, well_known

GPU = f"{well_known.RESOURCE_PREFIX}gpu"  # a whole GPU
_MIG_PREFIX = f"{well_known.RESOURCE_PREFIX}mig-"
SHARED = ".shared"  # suffix of the device plugin for a resource with replicas, if configured


@functools.lru_cache(maxsize=1024)  # pods may name any profile
def of_profile(profile: model.Profile) -> str | None:
    """Return the resource name of a MIG profile.

    None for a profile that does not span its GPU instance. NVIDIA's device plugin has no name for
    such devices, and exits if there is one.
    """
    # Resource names may not contain a plus sign.
    return f"{_MIG_PREFIX}{profile}".replace("+", ".") if profile.spans else None


def name_of(profile: model.Profile, strategy: strategies.Strategy | None) -> str | None:
    """Return the resource of a profile's devices; None: they have no name."""
    return GPU if strategy is strategies.Strategy.SINGLE else of_profile(profile)


def of_name(profile: str) -> str | None:
    """Return the resource of a profile by its name; None if the name is invalid or has none."""
    try:
        return of_profile(profile_name.parse(profile))
    except ValueError:
        return None


@functools.lru_cache(maxsize=1024)  # nodes and pods may name any
def profile_of(resource: str) -> model.Profile | None:
    """Return the profile of a MIG resource; None for another name, replicas included."""
    name = resource.removeprefix(_MIG_PREFIX).replace("gb.", "gb+", 1)
    try:
        profile = profile_name.parse(name)
    except ValueError:
        return None
    is_shared = resource.endswith(SHARED)
    return profile if of_profile(profile) == resource and not is_shared else None


def devices(
    gpu: model.Gpu, strategy: strategies.Strategy | None = strategies.Strategy.MIXED
) -> list[tuple[str | None, str, model.Placement | None]]:
    """Return id, resource and GPU instance of each device of a GPU, nameless ones excepted.

    A whole GPU has no GPU instance. A MIG device without UUID has no id: the driver lists none, or
    the GPU was published.
    """
    if gpu.current_mode is not model.MigMode.ENABLED or strategy is strategies.Strategy.NONE:
        return [(gpu.uuid, GPU, None)]
    return [
        (ci.uuid, name, gi.placement)
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
        if (name := name_of(ci.profile, strategy))
    ]


def counts(
    gpus: Iterable[model.Gpu], strategy: strategies.Strategy = strategies.Strategy.MIXED
) -> dict[str, int]:
    """Count the devices of each resource that a device plugin can advertise: those with an id."""
    return collections.Counter(
        name for gpu in gpus for uuid, name, _ in devices(gpu, strategy) if uuid
    )


def desired_counts(
    gpus: Iterable[model.Gpu],
    desired: Mapping[str, model.DesiredGpu],
    strategy: strategies.Strategy,
) -> dict[str, int]:
    """Count the devices of each resource once desired GPUs, by UUID, are applied.

    Whole GPUs are counted even if there is none.
    """
    total = collections.Counter({GPU: 0})
    for gpu in gpus:
        if gpu.name in strategies.DISPLAYS:
            continue
        gpu_desired = desired.get(gpu.uuid)
        if gpu_desired is None or gpu_desired.mode is not model.MigMode.ENABLED:
            total[GPU] += 1
            continue
        for profile, count in gpu_desired.counts.items():
            if name := name_of(profile, strategy):
                total[name] += count
    return dict(total)


def is_device(name: str) -> bool:
    """Return whether a resource is a GPU or a MIG device."""
    return name == GPU or is_mig(name)


def is_mig(name: str) -> bool:
    """Return whether a resource is a kind of MIG device."""
    return name.startswith(_MIG_PREFIX)


def is_device_or_shared(name: str) -> bool:
    """Return whether a resource is a GPU or a MIG device, with replicas or without."""
    return is_device(base(name))


def base(name: str) -> str:
    """Return a resource's name without the suffix for replicas."""
    return name.removesuffix(SHARED)


def other_name(name: str) -> str:
    """Return the other name that a device plugin can give the same devices, by its config.

    It adds the suffix to all replicas of a resource, or to none (``renameByDefault``).
    """
    return base(name) if name.endswith(SHARED) else name + SHARED


def without_replicas(ids: Iterable[str]) -> frozenset[str]:
    """Drop the ``::n`` that the device plugin appends to the ids of a shared device's replicas."""
    return frozenset(each.partition("::")[0] for each in ids)


def devices_of(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the existing GPUs and MIG devices among resources, with replicas or without."""
    return {name: n for name, n in numbers.items() if n and is_device_or_shared(name)}


def possible_resources(
    gpus: Iterable[model.Gpu], strategy: strategies.Strategy | None
) -> frozenset[str]:
    """Return the resources that a device plugin may advertise for these GPUs, without replicas.

    ``strategy`` None: unknown.
    """
    if strategy in (strategies.Strategy.NONE, strategies.Strategy.SINGLE):
        return frozenset({GPU})
    named = frozenset(counts(gpu for gpu in gpus if gpu.name not in strategies.DISPLAYS))
    return named if strategy is strategies.Strategy.MIXED else named | {GPU}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device of a node, and the pods that request it."""

    resource: str  # such as ``nvidia.com/mig-1g.5gb``
    count: int  # devices of this kind that the node has
    pods: Mapping[str, int]  # number that a pod requests, by ``namespace/name``

    @property
    def requested(self) -> int:
        """How many are requested in all."""
        return sum(self.pods.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Devices of one kind that a plan destroys, and the consequences for pods."""

    kind: DeviceKind
    destroyed: int
    replicas: int = 1  # how many pods can share one
    has_unknown: bool = False  # whether pods may use further devices, on an unreachable GPU

    @property
    def is_total(self) -> bool:
        """Whether every pod with such a device is affected."""
        return self.destroyed >= self.kind.count and not self.has_unknown

    @property
    def least(self) -> int:
        """The fewest devices in use that are destroyed: unused ones are counted first."""
        in_use = math.ceil(self.kind.requested / self.replicas)
        # While the plugin is away, a node does not show how many pods can share a device.
        if self.has_unknown or in_use > self.kind.count:
            return 0
        return max(0, in_use - max(0, self.kind.count - self.destroyed))


def replicas(capacity: Mapping[str, int], resource: str, count: int) -> int:
    """Return how many pods can share each of the ``count`` devices of a resource.

    ``capacity`` is the node's, which counts a device once for each replica.
    """
    # Kubelet keeps the capacity of a device's former name, shared or not, for five minutes.
    shown = max(capacity.get(resource, 0), capacity.get(resource + SHARED, 0))
    return max(1, shown // count)


def kinds(
    gpus: Iterable[model.Gpu],
    pods: Iterable[pod_object.Pod],
    *,
    strategy: strategies.Strategy | None,
) -> tuple[DeviceKind, ...]:
    """Return the kinds of devices of a node, most slices first, whole GPUs last.

    ``strategy`` None: unknown.
    """
    existing = collections.Counter(name for gpu in gpus for _, name, _ in devices(gpu, strategy))
    requests: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for pod in pods:
        for name, amount in pod.gpu_resources.items():
            if amount > 0 and is_device_or_shared(name) and not pod.is_finished:
                requests[base(name)][pod.key] += amount
    names = sorted(existing.keys() | requests.keys(), key=lambda name: (name == GPU, name))
    return tuple(
        DeviceKind(resource=name, count=existing[name], pods=dict(sorted(requests[name].items())))
        for name in names
    )


def losses(
    plan: steps.Plan,
    gpus: Sequence[model.Gpu],
    pods: Iterable[pod_object.Pod],
    *,
    strategy: strategies.Strategy | None,
    capacity: Mapping[str, int] = types.MappingProxyType({}),
) -> tuple[Loss, ...]:
    """Return the kinds of devices that a plan for these GPUs destroys and pods request.

    ``capacity`` is the node's, which counts a device once for each replica.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    destroyed: collections.Counter[str] = collections.Counter()
    for gpu_plan in plan.gpus:
        if gpu_plan.takes_whole_gpu or (strategy is strategies.Strategy.NONE and gpu_plan.steps):
            destroyed.update(name for _, name, _ in devices(by_uuid[gpu_plan.gpu_uuid], strategy))
        else:
            profiles = (each.profile for each in gpu_plan.of(steps.DestroyComputeInstance))
            destroyed.update(filter(None, (name_of(each, strategy) for each in profiles)))
    return tuple(
        Loss(
            kind=kind,
            destroyed=destroyed[kind.resource],
            replicas=replicas(capacity, kind.resource, kind.count),
            has_unknown=bool(model.unreachable_of(gpus)),
        )
        for kind in kinds(gpus, pods, strategy=strategy)
        if destroyed[kind.resource] and kind.pods
    )
