"""Nodes whose MIG devices pods get by ResourceClaims, from NVIDIA's DRA driver.

On such a node the ResourceSlices list the devices instead of ``status.allocatable``, and the
allocated claims show which ones pods have. A limit such as ``nvidia.com/mig-1g.10gb`` is served
if a DeviceClass names that resource. Where a device plugin offers MIG devices as well, the
scheduler prefers the plugin's (``NodeResourcesFit``), and this module leaves the node as it is.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mig_manager.core import messages
from mig_manager.core.node.devices import claims, device_classes, resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import partitioned_nodes

_UNREADABLE = "the partitioner cannot list ResourceClaims"
_DYNAMIC = "its DRA driver creates MIG devices by itself (DynamicMIG)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterClaims:
    """What the API shows about MIG devices by claims."""

    classes: tuple[device_classes.DeviceClass, ...] = ()
    slices: tuple[claims.Slice, ...] = ()  # slices of NVIDIA's DRA driver, on all nodes
    allocated: tuple[frozenset[claims.Device], ...] | None = ()
    """Devices of each ResourceClaim; None: claims cannot be read, so any device may have one."""


def with_claims(
    nodes: Iterable[partitioned_nodes.PartitionedNode], cluster: ClusterClaims
) -> tuple[partitioned_nodes.PartitionedNode, ...]:
    """Return the nodes with the devices that they have by claims."""
    claimable = frozenset(each.resource for each in cluster.classes)
    by_pool: dict[str, list[claims.Slice]] = collections.defaultdict(list)
    for each in claims.newest(cluster.slices):
        # The driver names a node's pool after the node.
        by_pool[each.pool].append(each)
    claimed: dict[str, set[str]] = collections.defaultdict(set)
    for devices in cluster.allocated or ():
        for pool, device in devices:
            claimed[pool].add(device)

    def complete(node: partitioned_nodes.PartitionedNode) -> partitioned_nodes.PartitionedNode:
        if node.name not in by_pool or _has_plugin(node.supply):
            return node
        if cluster.allocated is None:
            supply = dataclasses.replace(node.supply, mismatch=_UNREADABLE)
        else:
            slices, in_claims = by_pool[node.name], claimed.get(node.name, set())
            supply = _with_devices(node.supply, slices, in_claims, claimable)
        return dataclasses.replace(node, supply=supply)

    return tuple(map(complete, nodes))


def _has_plugin(supply: partitioned_nodes.Supply) -> bool:
    return any(resources.is_mig(name) for name, _ in supply.allocatable)


def _with_devices(
    supply: partitioned_nodes.Supply,
    slices: Sequence[claims.Slice],
    claimed: AbstractSet[str],
    claimable: frozenset[str],
) -> partitioned_nodes.Supply:
    names = {name: resource for each in slices for name, resource in _resources(each).items()}
    repelling = {name for each in slices for name in each.taints}
    listed = collections.Counter(names.values())
    is_dynamic = any(not each.uuids[name] for each in slices for name in _resources(each))
    mismatch = (
        _DYNAMIC
        if is_dynamic
        else partitioned_nodes.why_differing(
            dict(supply.devices), listed, "the DRA driver's devices"
        )
    )
    # A change restarts the driver, which then publishes the devices without their taints.
    tainted = messages.list_names(claims.tainted_devices(slices))
    # A tainted device with a claim also counts in the claims, so it takes no other's place.
    unusable = repelling - claimed
    usable = collections.Counter(each for name, each in names.items() if name not in unusable)
    allocatable = {name: count for name, count in usable.items() if name in claimable}
    in_claims = collections.Counter(names[name] for name in claimed if name in names)
    return dataclasses.replace(
        supply,
        allocatable=demand.to_amounts({**dict(supply.allocatable), **allocatable}),
        claimed=demand.to_amounts(in_claims),
        claimable=claimable,
        mismatch=mismatch or (f"the DRA driver has tainted {tainted}" if tainted else ""),
    )


def _resources(published: claims.Slice) -> Mapping[str, str]:
    """Return the MIG devices of a slice, with the resource of their profile."""
    named = ((name, resources.of_name(each)) for name, each in published.profiles.items())
    return {name: resource for name, resource in named if resource}
