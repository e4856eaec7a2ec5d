"""The quick comparisons of a decision give the same answers as a search of every node."""

import dataclasses
from collections.abc import Iterator

import hypothesis
from hypothesis import strategies as st

from mig_manager.core.objects import selectors
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.batch import assumed_pods, batches, feasible_nodes
from mig_manager.core.partitioning.decision import decisions, offers, situations
from mig_manager.core.partitioning.nodes import exclusions, node_index, node_requests, node_sets
from tests.rigs.cluster import partitions
from tests.unit.partitioning import drawn_clusters
from tests.unit.partitioning.drawn_clusters import Cluster

_REQUIREMENTS = tuple(
    selectors.Requirement(key=key, operator=operator, values=("1",))
    for key in ("pool", "none")
    for operator in ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
)
_BY_NAME = selectors.Requirement(key="metadata.name", operator="In", values=("n1", "n3"))
_TERMS = st.tuples(
    st.lists(st.sampled_from(_REQUIREMENTS), max_size=2).map(tuple),
    st.sampled_from([(), (_BY_NAME,)]),
)
_TOLERATIONS = (
    demand.Toleration(key="a", operator="Exists", value="", effect=""),
    demand.Toleration(key="", operator="Exists", value="", effect="NoExecute"),
)
_TAINTS = tuple(
    demand.Taint(key=key, value="", effect=effect)
    for key in ("a", "node.kubernetes.io/unschedulable")
    for effect in ("NoSchedule", "NoExecute")
)


class ClaimedBatch:
    """A cluster with the pods assumed that have room."""

    def __init__(self, cluster: Cluster) -> None:
        nodes, pending = partitions.parse_cluster(cluster.nodes, cluster.pods)
        self.index = node_index.NodeIndex(nodes)
        reserved = cluster.limits["reserved"]
        self.batch = batches.Batch(self.index, pending, reserved)
        self.assumed = assumed_pods.AssumedPods(self.index)
        self.rest: list[int] = []
        for rank, group in enumerate(self.batch.group):
            hosts = [*self.assumed.hosts(group, node_sets.EMPTY)]
            assert sorted(hosts) == [i for i in self.index.every if self.has_room(group, i)]
            if hosts:
                self.assumed.assume(group, hosts[0])
            else:
                self.rest.append(rank)
        self.feasible = feasible_nodes.FeasibleNodes(
            self.index, self.batch, reserved, self.assumed
        )

    def has_room(self, group: batches.Group, position: int) -> bool:
        available = self.assumed.available[position]
        return position in self.index.ready - group.excluded and all(
            available.get(name, 0) >= count for name, count in group.needs.amounts
        )

    @property
    def search(self) -> offers.Offers:
        return offers.Offers(self.index, self.batch, self.feasible)

    def single(self, ranks: list[int]) -> Iterator[offers.Offer]:
        """Search every node."""
        search = self.search
        for position in self.index.every:
            offer = search.offer(position, self.batch.queue(ranks), skipped={})
            if offer:
                yield offer


@hypothesis.given(drawn_clusters.clusters())
def test_best_offer_is_the_least_of_the_offers_of_all_nodes(cluster: Cluster) -> None:
    parsed = ClaimedBatch(cluster)
    expected = min(parsed.single(parsed.rest), key=lambda offer: offer.order, default=None)
    best = parsed.search.best(parsed.index.every, parsed.rest, skipped={})
    assert (best and best.order) == (expected and expected.order)


@hypothesis.given(drawn_clusters.clusters())
def test_nodes_that_serve_a_pod_are_those_with_an_offer_to_it(
    cluster: Cluster,
) -> None:
    parsed = ClaimedBatch(cluster)
    for rank in parsed.rest:
        group = parsed.batch.group[rank]
        assert not [*parsed.assumed.hosts(group, node_sets.EMPTY)]
        serving = parsed.feasible.serving(group, parsed.index.every)
        assert [*serving] == [offer.position for offer in parsed.single([rank])]


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(["", "1", "2"]), st.sets(st.sampled_from(_TAINTS)))),
    st.sets(st.sampled_from([("pool", "1"), ("none", "1")])),
    st.none() | st.lists(_TERMS, max_size=2).map(tuple),
    st.sets(st.sampled_from(_TOLERATIONS)),
)
def test_sets_of_excluded_nodes_agree_with_the_check_of_one_node(
    facts: list[tuple[str, set[demand.Taint]]],
    selector: set[tuple[str, str]],
    affinity: tuple[demand.Term, ...] | None,
    tolerations: set[demand.Toleration],
) -> None:
    node = partitions.parse_cluster([partitions.node("n", ("7g.40gb@0",))], ())[0][0]
    by_claims = dataclasses.replace(node.supply, claimable=frozenset({"nvidia.com/mig-1g.5gb"}))
    nodes = [
        dataclasses.replace(
            node,
            name=f"n{number}",
            labels={"pool": pool} if pool else {},
            taints=tuple(taints),
            supply=node.supply if number % 3 else by_claims,
        )
        for number, (pool, taints) in enumerate(facts)
    ]
    needs = demand.Needs(
        amounts=(("nvidia.com/mig-7g.40gb", 1),),
        selector=tuple(sorted(selector)),
        affinity=affinity,
        tolerations=tuple(tolerations),
    )
    whys = [""] * len(nodes)
    for why, excluded in exclusions.Exclusions(nodes).of(needs).items():
        for position in excluded:
            whys[position] += why
    assert whys == ["".join(exclusions.Exclusions([node]).of(needs)) for node in nodes]


@hypothesis.given(drawn_clusters.clusters(), drawn_clusters.clusters())
def test_a_decision_is_the_same_with_values_kept_from_the_last_one(
    one: Cluster, two: Cluster
) -> None:
    cache = node_index.NodeCache()
    limits = decisions.PartitionerLimits(**one.limits)
    first, pending = partitions.parse_cluster(one.nodes, one.pods)
    kept = {node.name: node for node in first}
    for cluster in (one, two, one):
        # Every other node is the same object again.
        nodes = [
            kept[node.name] if number % 2 and node.name in kept else node
            for number, node in enumerate(partitions.parse_cluster(cluster.nodes, ())[0])
        ]
        cached, fresh = (
            situations.Situation(index=index, limits=limits, now=partitions.NOW)
            for index in (node_index.NodeIndex(nodes, cache), node_index.NodeIndex(nodes))
        )
        assert decider.decide(cached, pending) == decider.decide(fresh, pending)


def test_amounts_find_the_nodes_with_less() -> None:
    amounts = node_sets.NodeAmounts([{"cpu": 3}, {}, {"cpu": 1}, {"cpu": 3, "memory": 1}])
    assert [*amounts.fewer("cpu", 0)] == []
    assert [*amounts.fewer("cpu", 2)] == [1, 2]
    assert [*amounts.fewer("cpu", 9)] == [0, 1, 2, 3]
    assert [*amounts.short([("cpu", 2), ("memory", 1)])] == [0, 1, 2]


@hypothesis.given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.none() | st.tuples(st.sampled_from("ab"), st.integers(0, 2))
        )
    )
)
def test_requests_of_pods_are_counted_as_they_come_and_go(
    changes: list[tuple[int, tuple[str, int] | None]],
) -> None:
    requests, pods = node_requests.Requests(), dict[int, demand.BoundPod]()
    for number, change in changes:
        now = change and demand.BoundPod(
            uid=f"{number}",
            node_name=change[0],
            amounts=demand.to_amounts({"cpu": change[1], "pods": 1}),
        )
        requests.replace(pods.pop(number, None), now)
        if now:
            pods[number] = now
        fresh = node_requests.Requests(pods.values())
        assert all(requests.of(name) == fresh.of(name) for name in "ab")
