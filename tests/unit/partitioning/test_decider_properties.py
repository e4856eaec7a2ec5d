"""What holds of every decision of the partitioner, whatever nodes and pods there are."""

import collections
import dataclasses
import datetime as dt
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions, waiting
from tests.rigs.cluster import partitions
from tests.rigs.node import samples
from tests.unit.partitioning import drawn_clusters
from tests.unit.partitioning.drawn_clusters import Cluster


def decide(cluster: Cluster, *, is_expected: bool = False) -> decisions.PartitioningDecision:
    """Decide about the pods, or about preparing nodes for them beside all but the first."""
    pods: dict[str, Any] = {"pods": cluster.pods}
    if is_expected:
        pods = {"pods": cluster.pods[1:], "expected": cluster.pods}
    return partitions.decide(cluster.nodes, **pods, **cluster.limits)


def counts(gpus: Sequence[model.Gpu]) -> "collections.Counter[model.Profile]":
    return sum(
        (collections.Counter(samples.devices_of(gpu)) for gpu in gpus), collections.Counter()
    )


def devices_for(pods: Sequence[demand.PendingPod]) -> "collections.Counter[model.Profile]":
    return sum((collections.Counter(pod.needs.profiles) for pod in pods), collections.Counter())


@hypothesis.given(drawn_clusters.clusters(), st.booleans())
def test_no_change_touches_an_instance_in_use_or_a_gpu_of_unknown_use(
    cluster: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    for change in decide(cluster, is_expected=is_expected).changes:
        gpus = cluster.gpus[change.node]
        assert partitions.requested_gpus(change, gpus).keys() <= cluster.in_use[change.node].keys()
        _, gone = partitions.after(change, gpus)
        assert not gone & cluster.spans(change.node)


@hypothesis.given(drawn_clusters.clusters(), st.booleans())
def test_after_a_change_its_pods_and_those_left_to_the_scheduler_fit(
    cluster: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    decision = decide(cluster, is_expected=is_expected)
    for change in decision.changes:
        now, _ = partitions.after(change, cluster.gpus[change.node])
        rooms = decision.room_since
        others = [w.pod for w in decision.waiting if change.node in rooms.get(w.pod.uid, ())]
        used = cluster.spans(change.node)
        idle = counts(
            [
                dataclasses.replace(
                    gpu,
                    gpu_instances=tuple(
                        gi for gi in gpu.gpu_instances if (gpu.uuid, gi.placement) not in used
                    ),
                )
                for gpu in now
            ]
        )
        assert change.pods or is_expected or not change.created
        assert devices_for([*change.pods, *others]) <= idle


@hypothesis.given(drawn_clusters.clusters(), st.booleans())
def test_a_change_leaves_the_reserved_devices_that_there_were(
    cluster: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    for change in decide(cluster, is_expected=is_expected).changes:
        before = counts(cluster.gpus[change.node])
        now, _ = partitions.after(change, cluster.gpus[change.node])
        for profile, count in cluster.limits["reserved"].items():
            assert counts(now)[profile] >= min(count, before[profile])


@hypothesis.given(drawn_clusters.clusters())
def test_each_pod_gets_exactly_one_answer(cluster: Cluster) -> None:
    decision = decide(cluster)
    answered = [pod.uid for change in decision.changes for pod in change.pods]
    answered += [each.pod.uid for each in decision.unmet]
    answered += [each.pod.uid for each in decision.waiting]
    assert sorted(answered) == sorted(pod["metadata"]["uid"] for pod in cluster.pods)


@hypothesis.given(drawn_clusters.clusters(), st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_pods_does_not_matter(
    cluster: Cluster, chance: random.Random
) -> None:
    nodes, pods = cluster.nodes, list(cluster.pods)
    chance.shuffle(nodes)
    chance.shuffle(pods)
    assert partitions.decide(nodes, pods, **cluster.limits) == decide(cluster)


@hypothesis.given(drawn_clusters.clusters())
def test_a_decision_after_the_changes_makes_no_further_change(cluster: Cluster) -> None:
    cluster = dataclasses.replace(cluster, limits={**cluster.limits, "max_unavailable": "100%"})
    decision = decide(cluster)
    history = partitions.remember(cluster.nodes, cluster.pods, decision)
    gpus = dict(cluster.gpus)
    for change in decision.changes:
        gpus[change.node] = model.ObservedGpus(partitions.after(change, gpus[change.node])[0])
    again = partitions.decide(
        dataclasses.replace(cluster, gpus=gpus).nodes,
        cluster.pods,
        history=history,
        now=partitions.NOW + dt.timedelta(seconds=1),
        **cluster.limits,
    )
    served = {pod.uid for change in decision.changes for pod in change.pods}
    placed = {
        each.pod.uid for each in again.waiting if each.reason is waiting.WaitReason.SCHEDULER
    }
    assert served <= placed
    assert not any(change.pods for change in again.changes)


def ways(
    profiles: Sequence[model.Profile], beside: list[tuple[model.Profile, model.Placement]]
) -> Iterator[bool]:
    """Try every placement of every device."""
    if not profiles:
        yield True
        return
    for place in drawn_clusters.SPECS[profiles[0]].placements:
        there = [*beside, (profiles[0], place)]
        if drawn_clusters.fits(there):
            yield from ways(profiles[1:], there)


Spot = tuple[model.Profile, model.Placement]


def fewest_destroyed(
    profiles: collections.Counter[model.Profile], idle: list[Spot], fixed: list[Spot]
) -> list[int]:
    """Try all ways to serve a pod; return how many idle instances must go, or nothing."""
    free = collections.Counter(profile for profile, _ in idle)
    for size in range(len(idle), -1, -1):
        for stay in itertools.combinations(idle, size):
            # What of the idle devices serves the pod as it is must be there afterwards too.
            again = (profiles & free) - collections.Counter(profile for profile, _ in stay)
            if next(ways([*(profiles - free + again).elements()], [*fixed, *stay]), False):
                return [len(idle) - size]
    return []


@hypothesis.given(
    drawn_clusters.instances().filter(lambda texts: not any("[" in text for text in texts)),
    st.lists(st.sampled_from(drawn_clusters.PROFILES), min_size=1, max_size=4),
)
def test_pod_is_served_whenever_possible_for_the_fewest_instances(
    texts: tuple[str, ...], names: list[str]
) -> None:
    requests = collections.Counter(samples.profile(name) for name in names)
    idle = [drawn_clusters.spot(text) for text in texts if not text.endswith("*")]
    fixed = [drawn_clusters.spot(text) for text in texts if text.endswith("*")]
    missing = requests - collections.Counter(profile for profile, _ in idle)

    spec = [f"{count}x{profile}" for profile, count in requests.items()]
    decision = partitions.decide([partitions.node("a", texts)], [partitions.pod("p", *spec)])

    assert bool(decision.room_since) is (not missing)
    if missing:
        destroyed = [sum(change.destroyed.values()) for change in decision.changes]
        assert destroyed == fewest_destroyed(requests, idle, fixed)


def test_the_names_of_resources_and_profiles_belong_together() -> None:
    for name in (*drawn_clusters.PROFILES, "1g.24gb+me.all", "2g.48gb-me", "1g.12gb+gfx"):
        profile = samples.profile(name)
        resource = resources.of_profile(profile) or ""
        assert resources.profile_of(resource) == profile
    assert resources.profile_of("nvidia.com/mig-1g.5gb.shared") is None
    assert resources.profile_of("nvidia.com/gpu") is None
    assert resources.profile_of("nvidia.com/mig-1c.2g.10gb") is None
