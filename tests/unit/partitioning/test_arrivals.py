"""Which pods are expected after recent arrivals."""

import pytest

from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import arrivals
from mig_manager.core.partitioning.nodes import node_index, partitioned_nodes

_SMALL = ("nvidia.com/mig-1g.5gb", 1)
_LARGE = ("nvidia.com/mig-7g.40gb", 2)
_NO_NODES = node_index.NodeIndex(())


def after(*times_s: tuple[tuple[str, int], float]) -> arrivals.Arrivals:
    past = arrivals.Arrivals()
    for device, at_s in times_s:
        past.add(demand.Needs(amounts=(("cpu", 1000), device)), at_s)
    return past


def expected_devices(
    past: arrivals.Arrivals, now_s: float, within_s: float
) -> list[tuple[str, int]]:
    return [
        each
        for pod in past.expected_pods(now_s, within_s, _NO_NODES)
        for each in pod.needs.amounts
    ]


def test_the_most_likely_pods_are_expected_first() -> None:
    past = after(*((_SMALL, at_s) for at_s in (0, 10, 20)), (_LARGE, 20))

    # The time of a device with seven slices is seven times as long.
    assert expected_devices(past, 30, 60) == [_LARGE, _SMALL]
    assert expected_devices(past, 30, 150) == [_LARGE, _LARGE, _SMALL, _LARGE]
    assert [pod.uid for pod in past.expected_pods(30, 60, _NO_NODES)] == ["0000", "0001"]


def test_fewer_pods_are_expected_the_longer_none_arrives() -> None:
    past = after((_LARGE, 0))

    assert expected_devices(past, 0, 35) == [_LARGE]
    # Probabilities of 9, 2 and 10 %.
    assert expected_devices(past, 900, 35) == [_LARGE]
    assert expected_devices(past, 1800, 35) == []
    assert expected_devices(past, 1800, 175) == [_LARGE]
    assert expected_devices(past, 9000, 1e9) == []


def test_no_pod_is_expected_within_no_time() -> None:
    past = after((_SMALL, 0))

    assert expected_devices(past, 0, 0) == []
    assert expected_devices(past, 0, 240) == [_SMALL]


def test_as_many_pods_are_expected_as_arrive_in_a_large_cluster() -> None:
    past = after(*((_SMALL, at_s) for at_s in range(0, 600, 4)))

    # 0.16 a second after ten minutes: 9.5 in the mean, 12 with a probability of 20 %.
    assert expected_devices(past, 600, 60) == [_SMALL] * 12
    assert len(past.expected_pods(600, 1e9, _NO_NODES)) == 500


def tolerating(key: str) -> tuple[demand.Toleration, ...]:
    return (demand.Toleration(key=key, operator="Exists", value="", effect=""),)


@pytest.mark.parametrize(
    ("tolerations", "count"), [(tolerating("team"), 1), (tolerating("gpu"), 2)]
)
def test_pods_count_together_if_they_may_use_the_same_nodes(
    tolerations: tuple[demand.Toleration, ...], count: int
) -> None:
    taint = demand.Taint(key="gpu", value="", effect="NoSchedule")
    nodes = [
        partitioned_nodes.PartitionedNode(
            name=name,
            version="1",
            labels={},
            taints=taints,
            is_opted_in=True,
            supply=partitioned_nodes.Supply(allocatable=()),
        )
        for name, taints in (("a", ()), ("b", (taint,)))
    ]
    past = arrivals.Arrivals()
    past.add(demand.Needs(amounts=(_SMALL,)), 0)
    past.add(demand.Needs(amounts=(_SMALL,), tolerations=tolerations), 0)

    # Each alone has a probability of 15 %; one of both 28 %, both 4 %.
    assert len(past.expected_pods(0, 100, node_index.NodeIndex(nodes))) == count
