"""Compare the devices that kubelet and the Node offer with the GPUs: can pods get them?"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.node.devices import device_ids, resources, strategies
from mig_manager.core.objects import node_object

_REPLICAS = ".replicas"  # end of the labels of GPU feature discovery for replicas


def why_not(
    gpus: model.ObservedGpus,
    allocatable: Mapping[str, frozenset[str]] | None,
    view: node_object.NodeView,
    *,
    strategy: strategies.Strategy | None = None,
    changed: Collection[str] | None = None,
) -> str:
    """Explain why the devices are not schedulable yet; empty if they are.

    ``allocatable`` are the healthy device ids by resource name from kubelet; None if kubelet does
    not answer: then only the node's counts are compared. ``strategy`` is the plugin's; None:
    unknown, so that whole GPUs count even where MIG is enabled. All devices of the GPUs with UUIDs
    in ``changed``, or of all GPUs, must be healthy; one of an unchanged GPU need not be.
    """
    # Kubelet may have devices of unreachable GPUs too.
    is_partial = bool(gpus.unreachable)
    if allocatable is None:
        is_enough = is_partial and _has_at_least(view, _among(gpus, changed), strategy)
        return "" if is_enough else _why_not_counted(gpus, view, strategy, changed)
    devices, ids = _devices(allocatable)
    registered = _count_registered(gpus, view.capacity, devices, strategy)
    for expected, needed in zip(
        _possible_devices(gpus, strategy),
        _possible_devices(_among(gpus, changed), strategy),
        strict=True,
    ):
        is_registered = registered >= len(expected)
        is_known = is_partial or ids <= expected
        if ids == expected or (ids and is_registered and is_known and needed <= ids):
            return "; ".join(
                f"the node's allocatable {name} is {shown}, {count} expected"
                for name, (shown, count) in sorted(_differing_counts(devices, view).items())
            )
    sliced, _ = device_ids.expected_ids(gpus)
    return (
        f"kubelet has {len(ids)} allocatable devices: {len(ids & sliced)} exist, "
        f"{len(sliced)} are expected{_unhealthy(gpus, ids, registered)}"
    )


def unreported_counts(
    gpus: model.ObservedGpus,
    allocatable: Mapping[str, frozenset[str]] | None,
    view: node_object.NodeView,
    *,
    strategy: strategies.Strategy | None = None,
) -> dict[str, int]:
    """Return the counts of devices that kubelet has and its Node does not show yet.

    Kubelet writes them with its next heartbeat, after up to 10 s (``nodeStatusUpdateFrequency``).
    Empty unless kubelet lists exactly the devices of all GPUs as healthy.
    """
    if allocatable is None or gpus.unreachable:
        return {}
    devices, ids = _devices(allocatable)
    if not ids or ids not in _possible_devices(gpus, strategy):
        return {}
    return {name: count for name, (_, count) in _differing_counts(devices, view).items()}


def destroyed_devices(
    gpus: model.ObservedGpus,
    allocatable: Mapping[str, frozenset[str]],
    strategy: strategies.Strategy | None,
) -> frozenset[str]:
    """Return kubelet's devices of NVIDIA's plugin that no GPU has; empty if a GPU is unreachable.

    Devices of other plugins have ids of another form. A GPU with MIG enabled is no device, unless
    the ``strategy`` is none, or unknown (None).
    """
    _, ids = _devices(allocatable)
    is_sliced = strategy not in (None, strategies.Strategy.NONE)
    return device_ids.destroyed_ids(ids, gpus, is_sliced=is_sliced)


def _devices(
    allocatable: Mapping[str, frozenset[str]],
) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """Return kubelet's devices by resource, and their ids without replicas."""
    devices = {
        name: ids
        for name, ids in allocatable.items()
        if ids and resources.is_device_or_shared(name)
    }
    return devices, resources.without_replicas(frozenset().union(*devices.values()))


def _differing_counts(
    devices: Mapping[str, frozenset[str]], view: node_object.NodeView
) -> dict[str, tuple[int, int]]:
    """Return the number of devices that a Node shows and that kubelet has, where they differ."""
    shown = resources.devices_of(view.allocatable)
    pairs = {
        name: (shown.get(name, 0), len(devices.get(name, ())))
        for name in devices.keys() | shown.keys()
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _unhealthy(gpus: Sequence[model.Gpu], ids: frozenset[str], registered: int) -> str:
    """Name the GPUs whose registered devices kubelet does not list as healthy.

    The device plugin marks one device of a GPU unhealthy after a critical Xid, later versions all
    of them (k8s-device-plugin#1929). No version marks a device healthy again before its restart.
    """
    expected, _ = device_ids.expected_ids(gpus)
    if not ids <= expected or registered < len(expected):
        return ""
    unhealthy = {gpu.index: device_ids.expected_ids((gpu,))[0] - ids for gpu in gpus}
    names = ", ".join(f"{len(each)} of GPU {index}" for index, each in unhealthy.items() if each)
    return f"; unhealthy, after an Xid until the device plugin restarts: {names}"


def is_plugin_stale(
    gpus: model.ObservedGpus,
    allocatable: Mapping[str, frozenset[str]] | None,
    view: node_object.NodeView,
    *,
    strategy: strategies.Strategy | None = None,
) -> bool:
    """Return whether the device plugin does not have the current devices."""
    is_partial = bool(gpus.unreachable)
    possible = _possible_devices(gpus, strategy)
    devices, ids = _devices(allocatable or {})
    if not (is_partial or any(ids <= expected for expected in possible)):
        return True
    if allocatable is None:
        return bool(why_not(gpus, None, view, strategy=strategy, changed=()))
    registered = _count_registered(gpus, view.capacity or view.allocatable, devices, strategy)
    # Only devices that are in one of the two show the plugin's strategy.
    common = frozenset.intersection(*possible)
    likely = [expected for expected in possible if ids & (expected - common)]
    return registered < min(map(len, likely or possible))


def has_too_few(gpus: Sequence[model.Gpu], view: node_object.NodeView) -> bool:
    """Return whether a node may lack devices, so that kubelet must be asked.

    A node without any has no device plugin, or a DRA driver.
    """
    registered = _count_registered(gpus, view.capacity, {}, None)
    return 0 < registered < len(device_ids.expected_ids(gpus)[0])


def _possible_devices(
    gpus: Iterable[model.Gpu], strategy: strategies.Strategy | None
) -> tuple[frozenset[str], ...]:
    """Return the device ids of the plugin by its strategy; both sets if that is unknown."""
    sliced, whole = device_ids.expected_ids(gpus)
    if strategy is None:
        return sliced, whole
    return (whole,) if strategy is strategies.Strategy.NONE else (sliced,)


def _why_not_counted(
    gpus: Sequence[model.Gpu],
    view: node_object.NodeView,
    strategy: strategies.Strategy | None,
    changed: Collection[str] | None,
) -> str:
    """Compare the node's counts with the plugin's expected devices by its strategy, or by any.

    A sum would not do: until kubelet's heartbeat the node may have as many devices of the former
    layout.
    """
    sliced, _ = device_ids.expected_ids(gpus)
    allocatable = resources.devices_of(view.allocatable)
    total = sum(allocatable.values())
    needed = len(device_ids.expected_ids(_among(gpus, changed))[0])
    counts = _counts(gpus)
    for expected in [counts[strategy]] if strategy else counts.values():
        if _is_as_expected(allocatable, expected, view.labels):
            return ""
        # Kubelet counts an unhealthy device in the capacity alone.
        capacity = resources.devices_of(view.capacity).items()
        likely = {name: n for name, n in capacity if name in allocatable}
        if total >= needed and _is_as_expected(likely, expected, view.labels):
            return ""
    return f"the node's allocatable counts {total} devices, {len(sliced)} are expected"


def _has_at_least(
    view: node_object.NodeView,
    gpus: Sequence[model.Gpu],
    strategy: strategies.Strategy | None,
) -> bool:
    """Return whether the node's allocatable has the devices of some of its GPUs."""
    shown = resources.devices_of(view.allocatable)
    has_mig = any(map(resources.is_mig, shown))
    likely = strategies.Strategy.MIXED if has_mig else strategies.Strategy.SINGLE
    bare = {resources.base(name): n for name, n in shown.items()}
    return all(bare.get(name, 0) >= n for name, n in _counts(gpus)[strategy or likely].items())


def _counts(gpus: Sequence[model.Gpu]) -> dict[strategies.Strategy, dict[str, int]]:
    """Return the number of devices by resource that the plugin has with each strategy."""
    plugin_gpus = [gpu for gpu in gpus if gpu.name not in strategies.DISPLAYS]
    return {strategy: resources.counts(plugin_gpus, strategy) for strategy in strategies.Strategy}


def _is_as_expected(
    counts: Mapping[str, int], expected: Mapping[str, int], labels: Mapping[str, str]
) -> bool:
    """Return whether counts are as expected, apart from replicas of shared devices.

    GPU feature discovery's label for replicas may still show the former layout: replicas change
    only with the plugin's config.
    """
    has_replicas = any(
        resources.is_device_or_shared(key.removesuffix(_REPLICAS))
        and key.endswith(_REPLICAS)
        and value not in ("0", "1")
        for key, value in labels.items()
    )
    bare = {resources.base(name): (name, n) for name, n in counts.items()}
    return bare.keys() == expected.keys() and all(
        n == expected[key]
        or (
            expected[key] > 0
            and n % expected[key] == 0
            and (has_replicas or name.endswith(resources.SHARED))
        )
        for key, (name, n) in bare.items()
    )


def _among(gpus: Iterable[model.Gpu], uuids: Collection[str] | None) -> tuple[model.Gpu, ...]:
    return tuple(gpu for gpu in gpus if uuids is None or gpu.uuid in uuids)


def _count_registered(
    gpus: Iterable[model.Gpu],
    counts: Mapping[str, int],
    devices: Mapping[str, frozenset[str]],
    strategy: strategies.Strategy | None,
) -> int:
    """Count devices of the present GPUs: kubelet keeps the capacity of a former layout a while.

    ``devices`` are the healthy ids by resource, which show the replicas of a shared device.
    """
    likely = strategies.Strategy.MIXED if any(map(resources.is_mig, devices)) else strategy
    names = resources.possible_resources(gpus, likely)
    return sum(
        count // _replicas(devices.get(name, frozenset()))
        for name, count in resources.devices_of(counts).items()
        if resources.base(name) in names
    )


def _replicas(ids: frozenset[str]) -> int:
    """Return how often a resource has each device; an unhealthy replica is not among the ids."""
    return math.ceil(len(ids) / max(1, len(resources.without_replicas(ids)))) or 1
