"""Which GPUs are on hold for large pods that no change can serve."""

import datetime as dt
from typing import Any

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import partitioned_nodes
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, NOW, decide, node, pod
from tests.rigs.node import samples
from tests.unit.partitioning.decision_cases import (
    BUSY,
    IN_USE,
    LARGE,
    OTHERS,
    TWO_ONES,
    DecisionCase,
)

_ONE = ["1g.5gb@0*"]
_FULL = ["4g.20gb@0*", "3g.20gb@4*"]
_NOT_READY = [node("a", _ONE, _FULL, is_ready=False)]  # no GPU can be on hold
_IDLE = [node("a", ["7g.40gb@0"], _FULL)]  # the pod needs no hold
LARGER = pod("large", "2x7g.40gb", age_s=700)
ON_HOLD = "it waits for a (its GPUs are on hold for another pod)"
HALF = [node("a", ["3g.20gb@0*"], ["1g.5gb@0*"])]
SMALLER = [pod(f"s{number}", "3g.20gb", age_s=5) for number in range(2)]
BUSY_NODE = [
    node(
        "a",
        ["4g.20gb@0*", "3g.20gb@4*"],
        ["2g.10gb@0*", "1g.5gb@2*", "2g.10gb@4*", "1g.5gb@6"],
    )
]
FREE_NODES = [
    node("a", ["1g.5gb@0*", "1g.5gb@4", "1g.5gb@5"], ["7g.40gb@0*"]),
    node("b", ["3g.20gb@0*"], ["3g.20gb@0*"]),
]
ON_A = f"large CHANGING: it waits for a (it is being changed); b ({IN_USE})"

DECISIONS = {
    "no idle GPU is on hold for a pod that lacks something else": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[
            pod("large", "7g.40gb", age_s=700, requests={"cpu": "60"}),
            pod("s", "1g.5gb", age_s=5),
            pod("daemon", node_name="a", requests={"cpu": "10"}),
        ],
        expected=["a: 1x 1g.5gb for s", f"large CHANGING: it waits for a ({OTHERS})"],
    ),
    "two GPUs are on hold for a pod of two": DecisionCase(
        nodes=[node("a", ["1g.5gb@0*"], ["1g.5gb@0*"], ["1g.5gb@0*", "3g.20gb@4*"])],
        pods=[LARGER, pod("small", "3g.20gb")],
        expected=[
            f"large IN_USE: {BUSY}",
            f"small IN_USE: {ON_HOLD}",
        ],
    ),
    "no more GPUs are on hold than a pod requests": DecisionCase(
        nodes=[node("a", ["1g.5gb@0*"], ["1g.5gb@0*"], ["1g.5gb@0*"])],
        pods=[LARGER, pod("small", "3g.20gb")],
        expected=[
            "a: 1x 3g.20gb for small",
            f"large CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a pod behind gets an instance on a GPU until a large pod has waited a while": DecisionCase(
        nodes=HALF,
        pods=[pod("large", "7g.40gb", age_s=10), *SMALLER],
        expected=["a: 2x 3g.20gb for s0, s1", f"large CHANGING: it waits for a ({OTHERS})"],
    ),
    "a pod behind gets no instance on a GPU on hold": DecisionCase(
        nodes=HALF,
        pods=[pod("large", "7g.40gb", age_s=30), *SMALLER],
        expected=[
            "a: 1x 3g.20gb for s0",
            f"large CHANGING: it waits for a ({OTHERS})",
            f"s1 CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a busy cluster holds no GPU soon": DecisionCase(
        nodes=BUSY_NODE,
        pods=[pod("large", "7g.40gb", age_s=500), pod("s", "1g.10gb", age_s=5)],
        expected=[
            "a: 1x 1g.10gb instead of 1x 1g.5gb for s",
            f"large CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a busy cluster holds a GPU late and destroys nothing": DecisionCase(
        nodes=BUSY_NODE,
        pods=[pod("large", "7g.40gb", age_s=700), pod("s", "1g.10gb", age_s=5)],
        expected=[
            f"large IN_USE: {BUSY}",
            "s IN_USE: it waits for a (its GPUs are on hold for another pod)",
        ],
    ),
    "idle instances are not destroyed before a GPU is on hold": DecisionCase(
        nodes=FREE_NODES,
        pods=[pod("large", "7g.40gb", age_s=10)],
        expected=[f"large IN_USE: it waits for a, b ({IN_USE})"],
    ),
    "idle instances on a hold are destroyed while much is free": DecisionCase(
        nodes=FREE_NODES,
        pods=[LARGE],
        expected=["a: on hold for a waiting pod on GPU 0, without 2x 1g.5gb", ON_A],
    ),
    "reserved devices on a hold stay": DecisionCase(
        nodes=FREE_NODES,
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: on hold for a waiting pod on GPU 0, without 1x 1g.5gb", ON_A],
    ),
}


def remember(
    nodes: list[dict[str, Any]],
    pods: list[dict[str, Any]],
    now: dt.datetime = NOW,
    history: situations.History | None = None,
    **limits: Any,
) -> tuple[decisions.PartitioningDecision, situations.History]:
    decision = decide(nodes, pods, now=now, history=history, **limits)
    # Without the changes: each decision finds the node at rest.
    decision_at_rest = decisions.PartitioningDecision(gpu_holds=decision.gpu_holds)
    return decision, partitions.remember(nodes, pods, decision_at_rest, now=now, history=history)


def gpus_on_hold(
    decision: decisions.PartitioningDecision, nodes: list[dict[str, Any]]
) -> list[str]:
    (gpus,) = (each.gpus for each in decision.gpu_holds.values())
    parsed = filter(None, map(partitioned_nodes.parse, nodes))
    return sorted(
        f"{each.name}{gpu.index}"
        for each in parsed
        for gpu in each.gpus
        if (each.name, gpu.uuid) in gpus
    )


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_holds_gpus_for_large_pods(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected


def test_a_gpu_on_hold_is_not_merged_back() -> None:
    nodes, pods = [node("a", _ONE, _ONE)], [pod("large", "7g.40gb", age_s=700)]
    parsed, _ = partitions.parse_cluster(nodes, ())
    sevens = {gpu.uuid: samples.desired_gpu({"1g.5gb": 7}) for each in parsed for gpu in each.gpus}
    options: dict[str, Any] = {"base": {"a": sevens}, "merge_back_after_s": 300}
    (_, history), now = remember(nodes, []), NOW

    for _ in range(2):
        now += dt.timedelta(seconds=400)
        assert not decide(nodes, pods, now=now, history=history, **options).changes
        _, history = remember(nodes, pods, now, history)

    # After a hold, too, the node had demand a moment ago.
    assert history.demand_at == {"a": now}


def test_a_hold_stays_on_gpus_that_are_used_as_little_as_others() -> None:
    before = [node("a", ["2g.10gb@0*"], ["3g.20gb@0*"]), node("b", _FULL, _FULL)]
    pods = [pod("large", "7g.40gb", age_s=700)]
    first, history = remember(before, pods, cooldown_s=0.0)
    now = NOW + dt.timedelta(seconds=60)
    equal = [node("a", ["2g.10gb@0*"], ["2g.10gb@0*"]), node("b", _ONE, _FULL)]

    again = decide(equal, pods, now=now, history=history)

    assert "a0" in gpus_on_hold(first, before)
    assert gpus_on_hold(again, equal)[-1] == "b0"


@pytest.mark.parametrize(
    "at_minutes",
    [{}, {10: _NOT_READY, 29: _NOT_READY}, {32: _IDLE}, {30: _NOT_READY, 58: _IDLE}],
    ids=["always", "no GPU during the hold", "room after it", "no GPU, then room"],
)
def test_a_pod_gets_no_hold_for_as_long_as_it_had_one(
    at_minutes: dict[float, list[dict[str, Any]]],
) -> None:
    nodes, pods = [node("a", _ONE, _FULL)], [pod("large", "7g.40gb", age_s=700)]
    history, have = situations.History(), []
    for minutes in sorted({0, 29.5, 31, 59, 61, *at_minutes}):
        now = NOW + dt.timedelta(minutes=minutes)
        decision, history = remember(at_minutes.get(minutes, nodes), pods, now, history)
        has_hold = any(each.gpus for each in decision.gpu_holds.values())
        assert not (has_hold and minutes in at_minutes)
        have += [has_hold] if minutes not in at_minutes else []

    assert have == [True, True, False, False, True]


def test_holds_go_by_priority_then_age() -> None:
    nodes = [node("a", _FULL, _ONE)]
    pods = [
        pod("old", "7g.40gb", age_s=900),
        pod("urgent", "7g.40gb", age_s=700, spec={"priority": 1}),
    ]

    assert list(decide(nodes, pods).gpu_holds) == ["uid-urgent"]
    assert list(decide(nodes, pods[:1]).gpu_holds) == ["uid-old"]


@pytest.mark.parametrize("single", [[], [_ONE]], ids=["four a pod", "first pod has one"])
def test_the_number_of_holds_is_bounded(single: list[list[str]]) -> None:
    nodes = [node(f"n{n:02}", *([_ONE] * 4)) for n in range(20)]
    nodes.append(node("single", *single, labels={"kind": "single"}))
    first = pod("first", "7g.40gb", age_s=900, spec={"nodeSelector": {"kind": "single"}})
    pods = [first, *(pod(f"p{n:02}", "7g.40gb", age_s=800 - n) for n in range(40))]

    decision = decide(nodes, pods)

    assert sum(len(each.gpus) for each in decision.gpu_holds.values()) == 16


@pytest.mark.parametrize("is_on_hold", [False, True])
def test_no_device_for_likely_pods_is_created_on_a_gpu_on_hold(
    is_on_hold: bool,  # noqa: FBT001 - a case
) -> None:
    nodes = [
        node("a", *[["1g.5gb@6*"]] * 4, labels={well_known.STATE_LABEL: "pending"}),
        node("b", _ONE, labels={"zone": "b"}),
        node("c", ["2g.10gb@0", "3g.20gb@4*"]),
    ]
    # Node c has room for this pod once it has rested, unless the likely pods keep its instance.
    pods = [pod("urgent", "4g.20gb", spec={"priority": 1})]
    if is_on_hold:
        pods.append(pod("large", "7g.40gb", spec={"nodeSelector": {"zone": "b"}}))
    history = situations.History(requests={"c": situations.LayoutRequest(at=NOW, content_hash="")})

    decision = decide(nodes, pods, history=history, expected=[pod("likely", "2g.10gb")] * 2)

    assert [*decision.gpu_holds] == (["uid-large"] if is_on_hold else [])
    assert [change.node for change in decision.changes] == ([] if is_on_hold else ["b"])
