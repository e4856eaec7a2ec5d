"""Nodes and pods of the API for the partitioner, in a notation that a test can read.

An instance of ``samples.gpu`` with ``*`` behind it is in use.
"""

import dataclasses
import datetime as dt
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core import model
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.decision import decisions, situations, waiting
from mig_manager.core.partitioning.nodes import (
    claimed_nodes,
    node_index,
    node_requests,
    partitioned_nodes,
)
from mig_manager.core.planner import planner
from tests.rigs import api_objects
from tests.rigs.node import driver_rules, samples

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
EMPTY: tuple[str, ...] = ()
SMALL = tuple(f"1g.5gb@{start}" for start in range(7))  # all-1g.5gb


def gpus(name: str, *instances: Sequence[str]) -> model.ObservedGpus:
    """Build the GPUs of a node; the UUIDs are of the form that NVIDIA's have."""
    return model.ObservedGpus(
        dataclasses.replace(
            samples.gpu(samples.A100, *(text.rstrip("*") for text in texts), index=index),
            uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{name}-{index}')}",
        )
        for index, texts in enumerate(instances)
    )


def placements_in_use(
    observed: Iterable[model.Gpu], *instances: Sequence[str]
) -> dict[str, frozenset[model.Placement]]:
    """Return the placements in use by UUID, from the same notation."""
    return {
        gpu.uuid: frozenset(
            gi.placement
            for gi, text in zip(gpu.gpu_instances, texts, strict=True)
            if text.endswith("*")
        )
        for gpu, texts in zip(observed, instances, strict=True)
    }


def node_object(  # noqa: PLR0913 - each is something that a node can have
    name: str,
    observed: model.ObservedGpus,
    in_use: Mapping[str, Collection[model.Placement]] | None,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
    allocatable: Mapping[str, Any] | None = None,
    is_ready: bool = True,
) -> dict[str, Any]:
    """Build a Node object of an agent at rest; without ``in_use`` it has not published it."""
    counts = resources.counts(observed)
    published = api_objects.annotations_of_agent(observed, in_use=in_use, at=NOW.isoformat())
    built = api_objects.a_node(
        name,
        {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND, **(labels or {})},
        annotations={**published, **(annotations or {})},
        allocatable={
            "cpu": "64",
            "memory": "512Gi",
            "pods": "110",
            **{resource: str(count) for resource, count in counts.items()},
            **(allocatable or {}),
        },
        ready="True" if is_ready else "False",
    )
    built["metadata"] |= {"uid": name, "resourceVersion": "7"}
    return built | {"spec": dict(spec or {})}


def node(name: str, *instances: Sequence[str], **changed: Any) -> dict[str, Any]:
    """Build a Node object from the notation of its GPUs' instances."""
    observed = gpus(name, *instances)
    return node_object(name, observed, placements_in_use(observed, *instances), **changed)


def pod(
    name: str,
    *devices: str,
    node_name: str = "",
    age_s: float = 60.0,
    spec: Mapping[str, Any] | None = None,
    requests: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build a Pod object that asks for MIG devices, ``2x1g.5gb``; with a node it is bound."""
    limits = {}
    for each in devices:
        count, _, profile = each.rpartition("x")
        limits[resources.of_profile(samples.profile(profile)) or ""] = count or "1"
    asks = {"limits": limits, "requests": {**limits, **(requests or {})}}
    containers = {"containers": [api_objects.a_container(resources=asks)]}
    built = api_objects.a_pod(
        name, node=node_name, namespace="ml", spec={**containers, **(spec or {})}
    )
    created = NOW - dt.timedelta(seconds=age_s)
    built["metadata"] |= {"creationTimestamp": created.isoformat(), **(metadata or {})}
    return built


def situation(
    nodes: Iterable[partitioned_nodes.PartitionedNode],
    *,
    now: dt.datetime = NOW,
    history: situations.History | None = None,
    **limits: Any,
) -> situations.Situation:
    """Return what a decision depends on; by default as many nodes as there are may change."""
    return situations.Situation(
        index=node_index.NodeIndex(nodes),
        limits=decisions.PartitionerLimits(**{"max_unavailable": "100%", **limits}),
        now=now,
        history=history or situations.History(),
    )


def decide(
    nodes: Iterable[Mapping[str, Any]],
    pods: Iterable[Mapping[str, Any]],
    *,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
    claims: claimed_nodes.ClusterClaims | None = None,
    expected: Iterable[Mapping[str, Any]] = (),
    **facts: Any,
) -> decisions.PartitioningDecision:
    """Parse both and decide in a ``situation`` of these ``facts``."""
    parsed_nodes, pending = parse_cluster(nodes, pods, claims)
    return decider.decide(
        situation(parsed_nodes, **facts),
        pending,
        base=base,
        expected=parse_cluster((), expected)[1],
    )


def remember(
    nodes: Iterable[Mapping[str, Any]],
    pods: Iterable[Mapping[str, Any]],
    decision: decisions.PartitioningDecision,
    **facts: Any,
) -> situations.History:
    """Return the history after a decision."""
    return situation(parse_cluster(nodes, pods)[0], **facts).after(decision)


def parse_cluster(
    nodes: Iterable[Mapping[str, Any]],
    pods: Iterable[Mapping[str, Any]],
    claims: claimed_nodes.ClusterClaims | None = None,
) -> tuple[tuple[partitioned_nodes.PartitionedNode, ...], tuple[demand.PendingPod, ...]]:
    """Parse nodes, with what bound pods take on them, and pending pods.

    Each instance in use is in use by a bound pod.
    """
    parsed = [each for each in map(demand.parse, pods) if each]
    plain = [each for each in map(partitioned_nodes.parse, nodes) if each]
    with_claims = claimed_nodes.with_claims(plain, claims or claimed_nodes.ClusterClaims())
    node_pods = [each for each in parsed if isinstance(each, demand.PodOfNode)]
    node_pods += [
        demand.BoundPod(
            uid="user",
            node_name=each.name,
            amounts=((resources.of_profile(ci.profile) or "", 1),),
        )
        for each in with_claims
        for gpu in each.gpus
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
        if gi.placement in each.in_use.get(gpu.uuid, ()) and ci.profile.spans
    ]
    pending = tuple(each for each in parsed if isinstance(each, demand.PendingPod))
    return node_requests.with_pods(with_claims, node_requests.Requests(node_pods)), pending


def only(decision: decisions.PartitioningDecision) -> decisions.NodeChange:
    """Return the only change of a decision."""
    (change,) = decision.changes
    return change


def _in_words(counts: Mapping[model.Profile, int]) -> str:
    """Return devices in words."""
    return ", ".join(f"{count}x {profile}" for profile, count in sorted(counts.items(), key=str))


def lines(decision: decisions.PartitioningDecision) -> list[str]:
    """Return the changes of a decision, then the pods without room, in words."""
    return [
        *(
            f"{change.node}: {_in_words(change.created)}"
            + (f" instead of {_in_words(change.destroyed)}" if change.destroyed else "")
            + f" for {', '.join(each.name for each in change.pods) or 'expected pods'}"
            if change.created
            else f"{change.node}: {change.why}, without {_in_words(change.destroyed)}"
            for change in decision.changes
        ),
        *(f"{each.pod.name} {each.reason.name}: {each.message}" for each in decision.waiting),
        *(f"{each.pod.name} unmet: {each.message}" for each in decision.unmet),
    ]


def why(decision: decisions.PartitioningDecision) -> tuple[waiting.WaitReason, str]:
    """Return why the only waiting pod waits."""
    (waits,) = decision.waiting
    return waits.reason, waits.message


def requested_gpus(
    change: decisions.NodeChange, observed: Sequence[model.Gpu]
) -> dict[str, model.DesiredGpu]:
    """Return what the text of a change asks of each GPU."""
    document = layout_parser.parse(change.layout, source="annotation")
    (layout,) = document.layouts.values()
    return selection.select(layout, observed)


def after(
    change: decisions.NodeChange, observed: Sequence[model.Gpu]
) -> tuple[tuple[model.Gpu, ...], frozenset[tuple[str, model.Placement]]]:
    """Return the GPUs after a change, and the instances that it destroys, by UUID."""
    plan = planner.plan(observed, requested_gpus(change, observed))
    steps_by_gpu = {each.gpu_uuid: each.steps for each in plan.gpus}
    now = tuple(driver_rules.execute(gpu, steps_by_gpu.get(gpu.uuid, ())) for gpu in observed)
    kept = {(gpu.uuid, gi.placement) for gpu in now for gi in gpu.gpu_instances}
    gone = {(gpu.uuid, gi.placement) for gpu in observed for gi in gpu.gpu_instances} - kept
    return now, frozenset(gone)
