"""Phantom devices: GPU resources that a node advertises although no GPU has such devices.

Five minutes after a device plugin stops, kubelet forgets its resources and reports that once
(kubernetes, ``endpointStopGracePeriod`` in ``pkg/kubelet/cm/devicemanager/types.go``). If the API
server is unavailable then, the update is lost. The Node keeps the capacity, and kubelet copies it
without a plugin into allocatable with each update (``MachineInfo`` in
``pkg/kubelet/nodestatus/setters.go``). Kubelet starts a pod that requests such a device without
one, because it treats the resource as one that needs no allocation.
"""

import json
from collections.abc import Callable, Iterable, Mapping

from mig_manager.core import model
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import node_object

_Devices = Mapping[str, frozenset[str]]


def find(
    gpus: model.ObservedGpus,
    view: node_object.NodeView,
    strategy: strategies.Strategy | None,
    kubelet: Callable[[], _Devices | None],
) -> dict[str, int]:
    """Return the phantom devices that a node advertises: their number by resource.

    Resources that the owner renamed are not recognised. Empty while a GPU is unreachable, because
    the devices may belong to it.

    Args:
        gpus: The node's GPUs.
        view: The node, with its advertised devices.
        strategy: How the device plugin names MIG devices; None: unknown.
        kubelet: Returns the healthy devices by resource; None if kubelet does not answer, and
            the strategy is not relied on, because its label may be outdated. Called only if
            something is in doubt.
    """
    if not is_possible(gpus, view, strategy):
        return {}
    advertised = resources.devices_of(view.allocatable)
    answer = kubelet()
    registered = {name for name, ids in (answer or {}).items() if ids}
    if any(map(resources.is_mig, registered)):
        strategy = strategies.Strategy.MIXED
    elif answer is None:
        strategy = None
    elif _has_unnamed_mig(gpus, answer):
        strategy = strategies.Strategy.NONE
    possible = _possible_resources(gpus, advertised, strategy)
    # One plugin gives devices one of the two names. It may have had the other with another config.
    former = {name for name in possible if resources.other_name(name) in registered}
    supplied = (possible - former) | registered
    if not any(map(resources.is_device_or_shared, registered)):
        # The plugin may be restarting, and may use other names than the profiles'.
        for name in advertised:
            resource = resources.base(name)
            if resource != resources.GPU and resources.profile_of(resource) is None:
                supplied.add(name)
    return {name: count for name, count in sorted(advertised.items()) if name not in supplied}


def is_possible(
    gpus: model.ObservedGpus, view: node_object.NodeView, strategy: strategies.Strategy | None
) -> bool:
    """Return whether a node may have phantom devices, as far as it and the GPUs show."""
    if not gpus or gpus.unreachable:
        return False
    advertised = resources.devices_of(view.allocatable)
    supplied = _possible_resources(gpus, advertised, strategy or strategies.Strategy.MIXED)
    has_two_names = any(resources.other_name(name) in advertised for name in advertised)
    whole = resources.counts(gpus).get(resources.GPU, 0)
    # Beside MIG devices a plugin advertises only the GPUs without MIG, or replicas of them.
    has_more_gpus = any(map(resources.is_mig, advertised)) and any(
        count > whole
        for name, count in advertised.items()
        if resources.base(name) == resources.GPU
    )
    return has_two_names or has_more_gpus or not advertised.keys() <= supplied


def message(advertised: Mapping[str, int]) -> str:
    """Describe the phantom devices of a node."""
    return f"the node advertises {with_counts(advertised)}, which no GPU has"


def with_counts(advertised: Mapping[str, int]) -> str:
    """Name resources with their numbers."""
    return ", ".join(f"{count} {name}" for name, count in advertised.items())


def remedy(node_name: str, names: Iterable[str]) -> str:
    """Return the command that removes resources from a node for good."""
    patch = json.dumps({"status": {"capacity": dict.fromkeys(names)}}, separators=(",", ":"))
    return f"kubectl patch node {node_name} --subresource=status --type=merge -p '{patch}'"


def _has_unnamed_mig(gpus: Iterable[model.Gpu], registered: _Devices) -> bool:
    """Return whether GPUs with MIG, or their MIG devices, are registered as whole GPUs.

    So the plugin's strategy is none or single, even if its label still shows the former one.
    """
    ids = frozenset().union(
        *(each for name, each in registered.items() if resources.base(name) == resources.GPU)
    )
    with_mig = [gpu for gpu in gpus if gpu.current_mode is model.MigMode.ENABLED]
    mig_ids = {uuid for gpu in with_mig for uuid in (gpu.uuid, *gpu.mig_uuids)}
    return not mig_ids.isdisjoint(resources.without_replicas(ids))


def _possible_resources(
    gpus: Iterable[model.Gpu], advertised: Iterable[str], strategy: strategies.Strategy | None
) -> set[str]:
    supplied = resources.possible_resources(gpus, strategy)
    return {name for name in advertised if resources.base(name) in supplied}
