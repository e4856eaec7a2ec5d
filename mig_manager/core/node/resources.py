"""Extended resources of a node: expected devices, advertised devices, and the pods' requests.

The API shows what a pod requests and where it runs, but not which device it got: only kubelet
knows. So the API gives certainty only if all devices of a kind are in use, or all are destroyed.
"""

import collections
import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model, profile_name, steps
from mig_manager.core.node import node_object, pod_object, well_known

GPU = f"{well_known.RESOURCE_PREFIX}gpu"  # A whole GPU
_MIG_PREFIX = f"{well_known.RESOURCE_PREFIX}mig-"
_SHARED = ".shared"  # suffix of the device plugin for a resource with replicas, if configured
_REPLICAS = ".replicas"
DISPLAYS = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""Console GPUs of a DGX Station, which the plugin skips: go-nvlib does so by name."""
STRATEGY_LABEL = "nvidia.com/mig.strategy"
"""Node label of GPU feature discovery, which has the plugin's strategy."""


class Strategy(enum.Enum):
    """How the device plugin names MIG devices."""

    NONE = "none"  # not at all: it advertises whole GPUs
    SINGLE = "single"  # all as ``nvidia.com/gpu``, which takes devices of one profile on all GPUs
    MIXED = "mixed"  # by profile, such as ``nvidia.com/mig-1g.5gb``


def of_profile(profile: model.Profile) -> str | None:
    """Return the resource name of a MIG profile.

    None for a profile that does not span its GPU instance: NVIDIA's device plugin has no name for
    such devices, and exits if there is one.
    """
    # Resource names may not contain a plus sign.
    return f"{_MIG_PREFIX}{profile}".replace("+", ".") if profile.spans else None


def name_of(profile: model.Profile, strategy: Strategy | None) -> str | None:
    """Return the resource of a profile's devices; None: they have no name."""
    return GPU if strategy is Strategy.SINGLE else of_profile(profile)


def profile_of(resource: str) -> model.Profile | None:
    """Return the profile of a MIG resource; None for another name, replicas included."""
    name = resource.removeprefix(_MIG_PREFIX).replace("gb.", "gb+", 1)
    try:
        profile = profile_name.parse(name)
    except ValueError:
        return None
    is_shared = resource.endswith(_SHARED)
    return profile if of_profile(profile) == resource and not is_shared else None


def counts(gpus: Iterable[model.Gpu]) -> dict[str, int]:
    """Count the devices of each resource with ``mig.strategy=mixed``, nameless ones excepted."""
    devices: collections.Counter[str] = collections.Counter()
    for gpu in gpus:
        if gpu.current_mode is not model.MigMode.ENABLED:
            devices[GPU] += 1
            continue
        names = (of_profile(device.profile) for device in gpu.devices if device.uuid)
        devices.update(name for name in names if name)
    return dict(devices)


def desired_counts(
    gpus: Iterable[model.Gpu], desired: Mapping[str, model.DesiredGpu], strategy: Strategy
) -> dict[str, int]:
    """Count the devices of each resource once desired GPUs, by UUID, are applied.

    Whole GPUs are counted even if there is none.
    """
    devices = collections.Counter({GPU: 0})
    for gpu in gpus:
        if gpu.name in DISPLAYS:
            continue
        gpu_desired = desired.get(gpu.uuid)
        if gpu_desired is None or gpu_desired.mode is not model.MigMode.ENABLED:
            devices[GPU] += 1
            continue
        for profile, count in gpu_desired.counts.items():
            if name := name_of(profile, strategy):
                devices[name] += count
    return dict(devices)


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
    return name.removesuffix(_SHARED)


def devices_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the existing GPUs and MIG devices among resources, with replicas or without."""
    return {name: n for name, n in counts.items() if n and is_device_or_shared(name)}


def supplied(gpus: Iterable[model.Gpu], strategy: Strategy | None) -> frozenset[str]:
    """Return the resources that a device plugin may advertise for these GPUs, without replicas.

    ``strategy`` None: unknown.
    """
    if strategy in (Strategy.NONE, Strategy.SINGLE):
        return frozenset({GPU})
    named = frozenset(counts(gpu for gpu in gpus if gpu.name not in DISPLAYS))
    return named if strategy is Strategy.MIXED else named | {GPU}


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
    ending: int

    @property
    def is_total(self) -> bool:
        """Whether every pod with such a device is affected."""
        return self.ending >= self.kind.count

    @property
    def least(self) -> int:
        """How many devices in use are destroyed even if unused ones go first."""
        return max(0, self.kind.requested - max(0, self.kind.count - self.ending))


def kinds(
    gpus: Iterable[model.Gpu], pods: Iterable[pod_object.Pod], *, strategy: Strategy | None
) -> tuple[DeviceKind, ...]:
    """Return the kinds of devices of a node, most slices first, whole GPUs last.

    ``strategy`` None: unknown.
    """
    devices = collections.Counter(name for gpu in gpus for name in _devices(gpu, strategy))
    requests: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for pod in pods:
        for name, amount in pod.gpu_resources.items():
            if amount > 0 and is_device_or_shared(name) and not pod.is_finished:
                requests[base(name)][pod.key] += amount
    names = sorted(devices.keys() | requests.keys(), key=lambda name: (name == GPU, name))
    return tuple(
        DeviceKind(resource=name, count=devices[name], pods=dict(sorted(requests[name].items())))
        for name in names
    )


def losses(
    plan: steps.Plan,
    gpus: Iterable[model.Gpu],
    pods: Iterable[pod_object.Pod],
    *,
    strategy: Strategy | None,
) -> tuple[Loss, ...]:
    """Return the kinds of devices that a plan for these GPUs destroys and pods request."""
    known = tuple(gpus)
    by_uuid = {gpu.uuid: gpu for gpu in known}
    ending: collections.Counter[str] = collections.Counter()
    for gpu_plan in plan.gpus:
        if gpu_plan.changes_mode or (strategy is Strategy.NONE and gpu_plan.steps):
            ending.update(_devices(by_uuid[gpu_plan.gpu_uuid], strategy))
        else:
            doomed = (s for s in gpu_plan.steps if isinstance(s, steps.DestroyComputeInstance))
            ending.update(_names([step.profile for step in doomed], strategy))
    return tuple(
        Loss(kind=kind, ending=ending[kind.resource])
        for kind in kinds(known, pods, strategy=strategy)
        if ending[kind.resource] and kind.pods
    )


def _devices(gpu: model.Gpu, strategy: Strategy | None) -> list[str]:
    if gpu.current_mode is not model.MigMode.ENABLED or strategy is Strategy.NONE:
        return [GPU]
    return _names((device.profile for device in gpu.devices), strategy)


def _names(profiles: Iterable[model.Profile], strategy: Strategy | None) -> list[str]:
    return [name for profile in profiles if (name := name_of(profile, strategy))]


def expected_devices(gpus: Iterable[model.Gpu]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the device ids of the device plugin: with MIG devices, and with ``none``."""
    known = tuple(gpu for gpu in gpus if gpu.name not in DISPLAYS)
    whole = frozenset(gpu.uuid for gpu in known)
    enabled = [gpu for gpu in known if gpu.current_mode is model.MigMode.ENABLED]
    unsliced = whole - {gpu.uuid for gpu in enabled}
    return unsliced.union(*(gpu.mig_uuids for gpu in enabled)), whole


def why_not_schedulable(
    gpus: Iterable[model.Gpu],
    allocatable: Mapping[str, frozenset[str]] | None,
    node: node_object.NodeView,
    *,
    changed: Collection[str] | None = None,
) -> str:
    """Explain why the devices are not schedulable yet; empty if they are.

    ``allocatable`` are the healthy device ids by resource name from kubelet; None if kubelet does
    not answer: then only the node's counts are compared. All devices of the GPUs with UUIDs in
    ``changed``, or of all GPUs, must be healthy; one of an unchanged GPU need not be.
    """
    # Kubelet may have devices of unreachable GPUs too.
    is_partial = bool(model.unreachable(gpus))
    known = tuple(gpus)
    if allocatable is None:
        why = _why_not_counted(known, node, changed)
        total = sum(devices_of(node.allocatable).values())
        is_enough = is_partial and total >= len(expected_devices(_among(known, changed))[0])
        return "" if is_enough else why
    devices = {name: ids for name, ids in allocatable.items() if is_device_or_shared(name) and ids}
    ids: frozenset[str] = frozenset().union(*devices.values())
    for expected, needed in zip(
        expected_devices(known), expected_devices(_among(known, changed)), strict=True
    ):
        is_registered = _count_registered(known, node.capacity) >= len(expected)
        is_known = is_partial or ids <= expected
        if ids == expected or (ids and is_registered and is_known and needed <= ids):
            return _compare_counts(devices, devices_of(node.allocatable))
    sliced, _ = expected_devices(known)
    return (
        f"kubelet has {len(ids)} allocatable devices: {len(ids & sliced)} exist, "
        f"{len(sliced)} are expected{_unhealthy(known, ids, node)}"
    )


def _unhealthy(gpus: Sequence[model.Gpu], ids: frozenset[str], node: node_object.NodeView) -> str:
    """Name the GPUs whose registered devices kubelet does not list as healthy.

    The device plugin marks one device of a GPU unhealthy after a critical Xid, later versions all
    of them (k8s-device-plugin#1929). No version marks a device healthy again before its restart.
    """
    expected, _ = expected_devices(gpus)
    if not ids <= expected or _count_registered(gpus, node.capacity) < len(expected):
        return ""
    unhealthy = {gpu.index: expected_devices((gpu,))[0] - ids for gpu in gpus}
    names = ", ".join(f"{len(each)} of GPU {index}" for index, each in unhealthy.items() if each)
    return f"; unhealthy, after an Xid until the device plugin restarts: {names}"


def is_plugin_stale(
    gpus: Sequence[model.Gpu],
    allocatable: Mapping[str, frozenset[str]] | None,
    node: node_object.NodeView,
) -> bool:
    """Return whether the device plugin does not have the current devices."""
    is_partial = bool(model.unreachable(gpus))
    sliced, whole = expected_devices(gpus)
    ids = frozenset().union(
        *(ids for name, ids in (allocatable or {}).items() if is_device_or_shared(name))
    )
    if not (is_partial or ids <= sliced or ids <= whole):
        return True
    if allocatable is None:
        return bool(why_not_schedulable(gpus, None, node, changed=()))
    registered = _count_registered(gpus, node.capacity or node.allocatable)
    # Only devices that are in one of the two show the plugin's strategy.
    likely = [expected for expected in (sliced, whole) if ids & (expected - (sliced & whole))]
    return registered < min(map(len, likely or (sliced, whole)))


def _why_not_counted(
    gpus: Sequence[model.Gpu], node: node_object.NodeView, changed: Collection[str] | None
) -> str:
    """Compare the node's counts with the plugin's expected devices by one of its strategies."""
    sliced, whole = expected_devices(gpus)
    allocatable = devices_of(node.allocatable)
    total = sum(allocatable.values())
    if total in (len(sliced), len(whole)):
        return ""
    needed = len(expected_devices(_among(gpus, changed))[0])
    mixed = counts(gpu for gpu in gpus if gpu.name not in DISPLAYS)
    for expected in (mixed, {GPU: len(sliced)}, {GPU: len(whole)}):
        if _is_as_expected(allocatable, expected, node.labels):
            return ""
        # Kubelet counts an unhealthy device in the capacity alone.
        capacity = devices_of(node.capacity).items()
        likely = {name: n for name, n in capacity if name in allocatable}
        if total >= needed and _is_as_expected(likely, expected, node.labels):
            return ""
    return f"the node's allocatable counts {total} devices, {len(sliced)} are expected"


def _is_as_expected(
    counts: Mapping[str, int], expected: Mapping[str, int], labels: Mapping[str, str]
) -> bool:
    """Return whether counts are as expected, apart from replicas of shared devices.

    GPU feature discovery's label for replicas may be of the former layout: replicas change only
    with the plugin's config.
    """
    has_replicas = any(
        is_device_or_shared(key.removesuffix(_REPLICAS))
        and key.endswith(_REPLICAS)
        and value not in ("0", "1")
        for key, value in labels.items()
    )
    bare = {base(name): (name, n) for name, n in counts.items()}
    return bare.keys() == expected.keys() and all(
        n == expected[key] or (n % expected[key] == 0 and (has_replicas or name.endswith(_SHARED)))
        for key, (name, n) in bare.items()
    )


def _among(gpus: Iterable[model.Gpu], uuids: Collection[str] | None) -> tuple[model.Gpu, ...]:
    return tuple(gpu for gpu in gpus if uuids is None or gpu.uuid in uuids)


def _count_registered(gpus: Iterable[model.Gpu], counts: Mapping[str, int]) -> int:
    """Count devices of the present GPUs: kubelet keeps the capacity of a former layout a while."""
    names = supplied(gpus, None)
    return sum(n for name, n in devices_of(counts).items() if base(name) in names)


def _compare_counts(devices: Mapping[str, frozenset[str]], counts: Mapping[str, int]) -> str:
    for name in sorted(devices.keys() | counts.keys()):
        expected, actual = len(devices.get(name, ())), counts.get(name, 0)
        # A shared (time-sliced) device counts once per replica.
        if (expected == 0 and actual != 0) or (expected and (actual == 0 or actual % expected)):
            return f"the node's allocatable {name} is {actual}, {expected} expected"
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """The MIG state of one GPU, now or desired."""

    name: str  # for messages, such as ``GPU 0``
    is_enabled: bool
    profiles: Collection[model.Profile]


def gpu_layouts(
    gpus: Iterable[model.Gpu], desired: Mapping[str, model.DesiredGpu]
) -> tuple[GpuLayout, ...]:
    """Return the layout of a node's GPUs once these desired GPUs, by UUID, are applied."""
    return tuple(
        gpu_layout(f"GPU {gpu.index}", desired[gpu.uuid])
        if gpu.uuid in desired
        else GpuLayout(
            name=f"GPU {gpu.index}",
            is_enabled=gpu.current_mode is model.MigMode.ENABLED,
            profiles=[device.profile for device in gpu.devices],
        )
        for gpu in gpus
        if gpu.name not in DISPLAYS
    )


def gpu_layout(name: str, desired: model.DesiredGpu) -> GpuLayout:
    """Return the layout of a desired GPU."""
    is_enabled = desired.mode is model.MigMode.ENABLED
    return GpuLayout(name=name, is_enabled=is_enabled, profiles=desired.counts)


def strategy_refusals(gpus: Sequence[GpuLayout]) -> Mapping[Strategy, str]:
    """Return why the plugin exits over a layout; strategies that it serves do not occur.

    The node then offers no device at all (k8s-device-plugin v0.20, ``internal/rm/device_map.go``
    and ``rm.go``).
    """
    refusals = {Strategy.SINGLE: _single_refusal(gpus)}
    nameless = {str(p) for gpu in gpus if gpu.is_enabled for p in gpu.profiles if not p.spans}
    if nameless:
        names = ", ".join(sorted(nameless))
        refusals[Strategy.MIXED] = f"no resource has the name of a part of a GPU instance: {names}"
    return {strategy: why for strategy, why in refusals.items() if why}


def without_devices(gpus: Iterable[GpuLayout]) -> str:
    """Name the MIG-enabled GPUs without a device; with ``mixed`` older plugins exit over them."""
    return ", ".join(gpu.name for gpu in gpus if gpu.is_enabled and not gpu.profiles)


def plugin_strategy(
    plugins: Sequence[pod_object.Pod], labels: Mapping[str, str]
) -> Strategy | None:
    """Return the strategy of a node's device plugin; None if unknown."""
    configured = filter(None, (pod.mig_strategy for pod in plugins))
    return _strategy(next(configured, labels.get(STRATEGY_LABEL) if plugins else None))


def labelled_strategy(labels: Mapping[str, str]) -> Strategy | None:
    """Return the strategy that GPU feature discovery last published; None if unknown."""
    return _strategy(labels.get(STRATEGY_LABEL))


def _strategy(name: str | None) -> Strategy | None:
    return next((strategy for strategy in Strategy if strategy.value == name), None)


def _single_refusal(gpus: Sequence[GpuLayout]) -> str:
    enabled = [gpu for gpu in gpus if gpu.is_enabled]
    if not enabled:
        return ""
    off = [gpu.name for gpu in gpus if not gpu.is_enabled]
    if off:
        return f"MIG is enabled on {enabled[0].name} and not on {off[0]}"
    if without_devices(enabled):
        return f"MIG is enabled without a MIG device on {without_devices(enabled)}"
    profiles = sorted({str(profile) for gpu in enabled for profile in gpu.profiles})
    return f"MIG devices differ: {', '.join(profiles)}" if len(profiles) > 1 else ""
