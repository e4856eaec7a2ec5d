"""Which GPUs are on hold for large pods that no change can serve."""

import datetime as dt
from typing import Any

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import partitioned_nodes
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import NOW, decide, node, pod
from tests.rigs.node import samples

_ONE = ["1g.5gb@0*"]
_FULL = ["4g.20gb@0*", "3g.20gb@4*"]
_NOT_READY = [node("a", _ONE, _FULL, is_ready=False)]  # no GPU can be on hold
_IDLE = [node("a", ["7g.40gb@0"], _FULL)]  # the pod needs no hold


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
    history = situations.History(requests={"c": situations.Request(at=NOW, content_hash="")})

    decision = decide(nodes, pods, history=history, expected=[pod("likely", "2g.10gb")] * 2)

    assert [*decision.gpu_holds] == (["uid-large"] if is_on_hold else [])
    assert [change.node for change in decision.changes] == ([] if is_on_hold else ["b"])
