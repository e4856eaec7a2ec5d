"""Which GPUs are on hold for large pods that no change can serve."""

import datetime as dt
from typing import Any

import pytest

from mig_manager.core.partitioning import decisions, holds, partitioned, past_decisions
from tests.unit import partitions, samples
from tests.unit.partitions import NOW, decided, node, pod

_ONE = ["1g.5gb@0*"]
_FULL = ["4g.20gb@0*", "3g.20gb@4*"]


def served(decision: decisions.PartitioningDecision) -> list[str]:
    return [each.name for change in decision.changes for each in change.pods]


def remembered(
    nodes: list[dict[str, Any]],
    pods: list[dict[str, Any]],
    now: dt.datetime = NOW,
    history: past_decisions.History | None = None,
    **limits: Any,
) -> tuple[decisions.PartitioningDecision, past_decisions.History]:
    history = history or past_decisions.History()
    decision = decided(nodes, pods, now=now, history=history, **limits)
    seen = partitions.seen(nodes, pods)
    # Without the changes: each decision finds the node at rest.
    asked = decisions.PartitioningDecision(gpu_holds=decision.gpu_holds)
    return decision, past_decisions.remember(history, *seen, asked, now=now)


def gpus_on_hold(
    decision: decisions.PartitioningDecision, nodes: list[dict[str, Any]]
) -> list[str]:
    (gpus,) = (each.gpus for each in decision.gpu_holds.values())
    parsed = filter(None, map(partitioned.parse, nodes))
    return sorted(
        f"{each.name}{gpu.index}"
        for each in parsed
        for gpu in each.gpus
        if (each.name, gpu.uuid) in gpus
    )


@pytest.mark.parametrize(
    ("age_s", "names"),
    [(10, ["s0", "s1"]), (30, ["s0"]), (700, ["s0"])],
)
def test_pods_behind_get_no_instance_on_a_gpu_on_hold(age_s: float, names: list[str]) -> None:
    nodes = [node("a", ["3g.20gb@0*"], _ONE)]
    small = [pod(f"s{n}", "3g.20gb", age_s=5) for n in range(2)]

    assert served(decided(nodes, [pod("large", "7g.40gb", age_s=age_s), *small])) == names


def test_busy_cluster_holds_late_and_destroys_nothing() -> None:
    nodes = [node("a", _FULL, ["2g.10gb@0*", "1g.5gb@2*", "2g.10gb@4*", "1g.5gb@6"])]
    small = pod("s", "1g.10gb", age_s=5)

    soon = decided(nodes, [pod("large", "7g.40gb", age_s=500), small])
    late = decided(nodes, [pod("large", "7g.40gb", age_s=700), small])

    assert served(soon) == ["s"]
    assert not soon.gpu_holds
    assert not late.changes
    assert gpus_on_hold(late, nodes) == ["a1"]


def test_idle_instances_on_a_hold_are_destroyed_while_much_is_free() -> None:
    nodes = [node("a", ["1g.5gb@0*", "1g.5gb@4", "1g.5gb@5"], ["7g.40gb@0*"])]
    nodes.append(node("b", ["3g.20gb@0*"], ["3g.20gb@0*"]))
    pods = [pod("large", "7g.40gb")]
    one = {samples.profile("1g.5gb"): 2}

    assert not decided(nodes, [pod("large", "7g.40gb", age_s=10)]).changes
    (change,) = decided(nodes, pods).changes
    (less,) = decided(nodes, pods, reserved=one).changes

    assert (change.node, change.pods, change.created) == ("a", (), {})
    assert change.destroyed == {samples.profile("1g.5gb"): 2}
    assert change.why == "on hold for a waiting pod on GPU 0"
    assert less.destroyed == {samples.profile("1g.5gb"): 1}


def test_a_gpu_on_hold_is_not_merged_back() -> None:
    nodes, pods = [node("a", _ONE, _ONE)], [pod("large", "7g.40gb", age_s=700)]
    parsed, _ = partitions.seen(nodes, ())
    sevens = {gpu.uuid: samples.want({"1g.5gb": 7}) for each in parsed for gpu in each.gpus}
    options: dict[str, Any] = {"base": {"a": sevens}, "merge_back_after_s": 300}
    (_, history), now = remembered(nodes, []), NOW

    for _ in range(2):
        now += dt.timedelta(seconds=400)
        assert not decided(nodes, pods, now=now, history=history, **options).changes
        _, history = remembered(nodes, pods, now, history)

    # After a hold, too, the node had demand a moment ago.
    assert history.demand_at == {"a": now}


def test_a_hold_stays_on_gpus_that_are_used_as_little_as_others() -> None:
    before = [node("a", ["2g.10gb@0*"], ["3g.20gb@0*"]), node("b", _FULL, _FULL)]
    pods = [pod("large", "7g.40gb", age_s=700)]
    first, history = remembered(before, pods, cooldown_s=0.0)
    now = NOW + dt.timedelta(seconds=60)
    equal = [node("a", ["2g.10gb@0*"], ["2g.10gb@0*"]), node("b", _ONE, _FULL)]

    again = decided(equal, pods, now=now, history=history)

    assert "a0" in gpus_on_hold(first, before)
    assert gpus_on_hold(again, equal)[-1] == "b0"


def test_a_pod_gets_no_hold_for_as_long_as_it_had_one() -> None:
    nodes, pods = [node("a", _ONE, _FULL)], [pod("large", "7g.40gb", age_s=700)]
    history, have = past_decisions.History(), []
    for minutes in (0, 29, 31, 59, 61):
        now = NOW + dt.timedelta(minutes=minutes)
        decision, history = remembered(nodes, pods, now, history)
        have.append(any(each.gpus for each in decision.gpu_holds.values()))

    assert have == [True, True, False, False, True]


def test_holds_go_by_priority_then_age() -> None:
    nodes = [node("a", _FULL, _ONE)]
    pods = [
        pod("old", "7g.40gb", age_s=900),
        pod("urgent", "7g.40gb", age_s=700, spec={"priority": 1}),
    ]

    assert list(decided(nodes, pods).gpu_holds) == ["uid-urgent"]
    assert list(decided(nodes, pods[:1]).gpu_holds) == ["uid-old"]


def test_the_number_of_holds_is_bounded() -> None:
    nodes = [node(f"n{n:02}", *([_ONE] * 4)) for n in range(20)]
    pods = [pod(f"p{n:02}", "7g.40gb", age_s=900 - n) for n in range(40)]

    decision = decided(nodes, pods)

    assert sum(len(each.gpus) for each in decision.gpu_holds.values()) <= 16
    assert all(isinstance(each, holds.HoldRecord) for each in decision.gpu_holds.values())
