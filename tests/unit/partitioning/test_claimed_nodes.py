"""The partitioner on nodes whose MIG devices pods get by ResourceClaims."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.node.devices import claims, device_classes
from mig_manager.core.partitioning.decision import decisions, waiting
from mig_manager.core.partitioning.nodes import claimed_nodes
from tests.rigs import api_objects
from tests.rigs.cluster import dra_driver, partitions
from tests.rigs.cluster.partitions import SMALL, pod, why
from tests.rigs.node import samples

Wait = waiting.WaitReason
ALL = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
NONE_BY_PLUGIN = {f"nvidia.com/mig-{profile}": "0" for profile in ALL}
"""What kubelet offers of the resources."""


def by_claims(
    *nodes: tuple[str, Sequence[str]],
    profiles: Iterable[str] = ALL,
    claimed: Iterable[tuple[str, int]] = (),
) -> tuple[list[dict[str, Any]], claimed_nodes.ClusterClaims]:
    """Build nodes of a GPU each, and what the API shows about their devices.

    ``profiles`` have DeviceClasses; ``claimed`` are nodes and first slices of devices with claims.
    """
    every = {name: partitions.gpus(name, texts) for name, texts in nodes}
    items = [partitions.node(name, texts, allocatable=NONE_BY_PLUGIN) for name, texts in nodes]
    named = {f"nvidia.com/mig-{profile}": profile for profile in profiles}
    return items, claimed_nodes.ClusterClaims(
        classes=tuple(
            device_classes.DeviceClass(name=profile, resource=resource)
            for resource, profile in named.items()
        ),
        slices=tuple(a_slice(name, gpus) for name, gpus in every.items()),
        allocated=tuple(frozenset({(name, f"gpu-0-mig-{at}")}) for name, at in claimed),
    )


def a_slice(name: str, gpus: Iterable[model.Gpu], *, generation: int = 1) -> claims.Slice:
    listed = api_objects.a_resource_slice(
        *dra_driver.devices(gpus), node=name, generation=generation
    )
    return claims.parse_slice(listed)


def decide(
    nodes: list[dict[str, Any]], cluster: claimed_nodes.ClusterClaims, *pods: dict[str, Any]
) -> decisions.PartitioningDecision:
    return partitions.decide(nodes, pods, claims=cluster)


def test_idle_devices_make_room_and_devices_of_claims_stay() -> None:
    in_use = [f"{text}*" if text in SMALL[:2] else text for text in SMALL]
    nodes, cluster = by_claims(("a", in_use), claimed=[("a", 0), ("a", 1)])

    (change,) = decide(nodes, cluster, pod("p", "3g.20gb")).changes

    assert dict(change.destroyed) == {samples.profile("1g.5gb"): 3}
    assert "1g.5gb@0" in change.layout
    assert "1g.5gb@1" in change.layout


def test_a_free_device_is_left_to_the_scheduler() -> None:
    nodes, cluster = by_claims(("a", SMALL), claimed=[("a", at) for at in range(6)])
    assert why(decide(nodes, cluster, pod("p", "1g.5gb")))[0] is Wait.SCHEDULER


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_device_with_a_claim_is_kept_before_its_pod_starts(claimed: int) -> None:
    nodes, cluster = by_claims(("a", SMALL), claimed=[("a", 6)] * claimed)
    decision = decide(nodes, cluster, pod("p", "7g.40gb"))
    assert len(decision.changes) == 1 - claimed


def test_claims_count_once_beside_the_limits_that_made_them() -> None:
    nodes, cluster = by_claims(("a", SMALL), claimed=[("a", 0)])
    bound = pod("running", "1g.5gb", node_name="a")

    (parsed,), _ = partitions.parse_cluster(nodes, [bound], cluster)

    assert parsed.available["nvidia.com/mig-1g.5gb"] == 6


def test_only_profiles_with_a_device_class_are_made() -> None:
    nodes, cluster = by_claims(("a", SMALL), profiles=["1g.5gb"])
    decision = decide(nodes, cluster, pod("p", "3g.20gb"))
    (unmet,) = decision.unmet
    assert "no DeviceClass serves nvidia.com/mig-3g.20gb" in unmet.message


def test_a_tainted_device_serves_no_pod_and_its_node_stays_as_it_is() -> None:
    nodes, cluster = by_claims(("a", ["7g.40gb@0"]))
    gpus = partitions.gpus("a", ["7g.40gb@0"])
    (device,) = dra_driver.devices(gpus)
    device["taints"] = [{"key": "gpu.nvidia.com/xid", "effect": "NoExecute"}]
    tainted = claims.parse_slice(api_objects.a_resource_slice(device, node="a"))
    cluster = claimed_nodes.ClusterClaims(classes=cluster.classes, slices=(tainted,))

    (parsed,), _ = partitions.parse_cluster(nodes, [], cluster)

    assert parsed.available["nvidia.com/mig-7g.40gb"] == 0
    assert why(decide(nodes, cluster, pod("p", "3g.20gb"))) == (
        Wait.UNUSABLE,
        "it waits for a (the DRA driver has tainted gpu-0-mig-0 (gpu.nvidia.com/xid))",
    )


def test_claim_of_a_tainted_device_takes_no_other_from_pods() -> None:
    nodes, cluster = by_claims(("a", [f"{SMALL[0]}*", *SMALL[1:]]), claimed=[("a", 0)])
    (one,) = cluster.slices
    tainted = dataclasses.replace(one, taints={"gpu-0-mig-0": "gpu.nvidia.com/xid"})
    cluster = dataclasses.replace(cluster, slices=(tainted,))

    decision = decide(nodes, cluster, *(pod(f"p{number}", "1g.5gb") for number in range(6)))

    assert {each.reason for each in decision.waiting} == {Wait.SCHEDULER}


@pytest.mark.parametrize(
    ("published", "unusable"),
    [
        ([(SMALL, 1)], ""),
        ([(SMALL[:6], 1)], "the DRA driver's devices differ from the instances"),
        # The driver has published fewer devices since.
        (
            [(SMALL, 1), (SMALL, 1), (SMALL[:1], 2)],
            "the DRA driver's devices differ from the instances",
        ),
        ([], "kubelet's resources differ from the instances"),
    ],
)
def test_node_whose_slices_differ_is_not_changed(
    published: list[tuple[Sequence[str], int]], unusable: str
) -> None:
    nodes, cluster = by_claims(("a", SMALL))
    slices = [
        a_slice("a", partitions.gpus("a", names), generation=generation)
        for names, generation in published
    ]
    cluster = claimed_nodes.ClusterClaims(classes=cluster.classes, slices=tuple(slices))

    (parsed,), _ = partitions.parse_cluster(nodes, [], cluster)

    assert parsed.unusable.startswith(unusable)
    assert bool(parsed.unusable) is bool(unusable)


def test_driver_that_creates_devices_itself_is_left_alone() -> None:
    nodes, cluster = by_claims(("a", SMALL))
    possible = [
        {"name": each["name"], "attributes": each["attributes"] | {"uuid": {"string": ""}}}
        for each in dra_driver.devices(partitions.gpus("a", SMALL))
    ]
    dynamic = claims.parse_slice(api_objects.a_resource_slice(*possible, node="a"))
    cluster = claimed_nodes.ClusterClaims(classes=cluster.classes, slices=(dynamic,))

    (parsed,), _ = partitions.parse_cluster(nodes, [], cluster)

    assert "DynamicMIG" in parsed.unusable


def test_node_with_a_device_plugin_stays_as_it_is() -> None:
    _, cluster = by_claims(("a", SMALL), claimed=[("a", 0)])
    nodes = [partitions.node("a", SMALL)]

    (parsed,), _ = partitions.parse_cluster(nodes, [], cluster)

    assert (parsed.supply.claimable, parsed.available["nvidia.com/mig-1g.5gb"]) == (None, 7)
