"""Which nodes are repartitioned for which pods, and what stays as it is."""

import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.fleet import batch, decisions, offers, past_decisions, waiting
from mig_manager.core.layout import config, custom_layouts, layouts
from mig_manager.core.node import well_known
from tests.unit import partitions, samples
from tests.unit.partitions import EMPTY, NOW, SMALL, decided, node, pod, why

Wait = waiting.Wait
LATER = NOW + dt.timedelta(seconds=400)


def text(counts: Any) -> str:
    return ", ".join(f"{count}x {profile}" for profile, count in sorted(counts.items(), key=str))


def only(decision: decisions.PartitioningDecision) -> decisions.Change:
    (change,) = decision.changes
    return change


def test_room_is_made_where_most_pods_cost_the_fewest_instances() -> None:
    nodes = [
        node("a", ["3g.20gb@0*", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"]),
        node("b", ["3g.20gb@0*", "3g.20gb@4"]),
    ]
    change = only(decided(nodes, [pod("p", "2g.10gb")], max_unavailable="1"))
    assert (change.node, change.version) == ("b", "7")
    assert (text(change.created), text(change.destroyed)) == ("1x 2g.10gb", "1x 3g.20gb")
    assert [each.key for each in change.pods] == ["ml/p"]
    assert change.why == "room for 1 pod on GPU 0"


def test_instances_in_use_are_pinned_and_idle_ones_kept_if_possible() -> None:
    every = partitions.gpus("a", ["2g.10gb@0", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    use = partitions.used(every, ["2g.10gb@0*", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    change = only(decided([partitions.item("a", every, use)], [pod("p", "2g.10gb")]))
    assert text(change.destroyed) == "1x 3g.20gb"
    assert partitions.wanted(change, every) == {
        every[0].uuid: samples.want({"2g.10gb@0": 1, "2g.10gb": 1, "1g.5gb": 2})
    }


def test_destroys_an_idle_instance_only_where_free_slices_do_not_do() -> None:
    change = only(
        decided([node("a", ["3g.20gb@0"], ["3g.20gb@0"])], [pod("p", "3g.20gb", "4g.20gb")])
    )
    assert (text(change.created), text(change.destroyed)) == ("1x 4g.20gb", "1x 3g.20gb")


def test_idle_instances_that_serve_a_pod_need_no_change_and_stay_for_it() -> None:
    nodes = [node("a", SMALL)]
    decision = decided(nodes, [pod("small", "7x1g.5gb"), pod("large", "7g.40gb", age_s=30)])
    reasons = {each.pod.name: (each.reason, each.node) for each in decision.waiting}
    assert not decision.changes
    assert reasons == {"small": (Wait.SCHEDULER, "a"), "large": (Wait.IN_USE, "")}


def test_instance_of_a_pod_that_was_just_bound_is_not_destroyed() -> None:
    bound = pod("new", "1g.5gb", node="a")
    decision = decided([node("a", SMALL)], [bound, pod("large", "7g.40gb")])
    assert not decision.changes
    assert why(decision) == (Wait.IN_USE, "it waits for a (too much of its GPUs is in use)")


def test_a_pod_gets_all_its_devices_on_one_node() -> None:
    half = ["3g.20gb@0*"]
    assert not decided([node("a", half), node("b", half)], [pod("p", "2x3g.20gb")]).changes
    change = only(decided([node("a", half), node("b", half, half)], [pod("p", "2x3g.20gb")]))
    assert (change.node, text(change.created)) == ("b", "2x 3g.20gb")


def test_the_first_in_order_is_served_though_another_node_could_serve_more() -> None:
    pods = [
        pod("a", "4g.20gb", age_s=90),
        *(pod(f"b{n}", "1g.5gb", spec={"nodeSelector": {"pool": "x"}}) for n in range(7)),
    ]
    nodes = [node("one", EMPTY), node("two", EMPTY, labels={"pool": "x"})]
    decision = decided(nodes, pods, max_unavailable="1")
    change = only(decision)
    assert change.pods[0].name == "a"


def test_priority_precedes_age() -> None:
    urgent = pod("urgent", "7g.40gb", age_s=1, spec={"priority": 10})
    change = only(decided([node("a", EMPTY)], [pod("old", "7g.40gb", age_s=900), urgent]))
    assert [each.name for each in change.pods] == ["urgent"]


def test_never_goes_below_the_reserved_devices_and_creates_none_of_them() -> None:
    reserved = {samples.profile("1g.5gb"): 2}
    change = only(decided([node("a", SMALL)], [pod("p", "4g.20gb")], reserved=reserved))
    assert text(change.created) == "1x 4g.20gb"
    decision = decided([node("a", SMALL)], [pod("p", "7g.40gb")], reserved=reserved)
    assert not decision.changes
    assert only(decided([node("a", EMPTY)], [pod("p", "7g.40gb")], reserved=reserved)).created


def test_moves_a_reserved_device_that_takes_the_slices() -> None:
    reserved = {samples.profile("1g.5gb"): 1}
    change = only(decided([node("a", ["1g.5gb@0"])], [pod("p", "4g.20gb")], reserved=reserved))
    assert (text(change.created), text(change.destroyed)) == (
        "1x 1g.5gb, 1x 4g.20gb",
        "1x 1g.5gb",
    )


def test_a_node_rests_between_two_changes() -> None:
    nodes, pods = [node("a", EMPTY)], [pod("p", "1g.5gb")]
    history = past_decisions.History(changed_at={"a": NOW - dt.timedelta(seconds=59)})
    decision = decided(nodes, pods, history=history, cooldown_s=60.0)
    assert why(decision) == (
        Wait.CHANGING,
        "it waits for a (it rests after a change for 1 s more)",
    )
    later = NOW + dt.timedelta(seconds=2)
    assert decided(nodes, pods, history=history, now=later, cooldown_s=60.0).changes
    assert decided(nodes, pods, history=history).changes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_ready": False}, "it is not ready"),
        ({"spec": {"unschedulable": True}}, "the node is cordoned"),
        ({"labels": {"nvidia.com/mig.strategy": "single"}}, "has MIG strategy single, not mixed"),
        ({"annotations": {well_known.CAPACITY_ANNOTATION: "{"}}, "which instances are in use"),
        ({"annotations": {well_known.GPUS_ANNOTATION: "{"}}, "has published no valid GPUs"),
        ({"allocatable": {"nvidia.com/mig-1g.5gb": "6"}}, "kubelet's resources differ"),
        ({"labels": {well_known.STATE_LABEL: "pending"}}, "its agent works on layout"),
        (
            {"annotations": {well_known.LAYOUTS_ANNOTATION: '{"version": 1, "layouts": {}}'}},
            "its agent takes no custom layouts",
        ),
        ({"annotations": {well_known.JOURNAL_ANNOTATION: "{}"}}, "interrupted"),
        ({"labels": {well_known.PARTITIONING_LABEL: "off"}}, "no node has the label"),
    ],
)
def test_a_node_that_is_not_fit_for_a_change_is_left_alone(
    changed: dict[str, Any], message: str
) -> None:
    decision = decided([node("a", SMALL, **changed)], [pod("p", "7g.40gb")])
    messages = [each.message for each in decision.waiting]
    (reason,) = [*messages, *(each.message for each in decision.unmet)]
    assert not decision.changes
    assert message in reason


def test_free_device_of_a_gpu_of_unknown_use_serves_a_pod() -> None:
    whole = ["7g.40gb@0"]
    every = partitions.gpus("a", whole, whole)
    use = partitions.used(every, whole, whole)
    del use[every[0].uuid]
    pods = [pod("both", "7g.40gb", "1g.5gb"), pod("small", "1g.5gb", age_s=30)]
    change = only(decided([partitions.item("a", every, use)], pods))
    assert [each.name for each in change.pods] == ["both", "small"]
    assert (text(change.created), text(change.destroyed)) == ("2x 1g.5gb", "1x 7g.40gb")


def test_a_gpu_of_unknown_use_or_without_mig_is_not_named() -> None:
    every = partitions.gpus("a", EMPTY, EMPTY)
    use: dict[str, list[list[int]]] = {every[1].uuid: []}
    change = only(decided([partitions.item("a", every, use)], [pod("p", "1g.5gb")]))
    assert list(partitions.wanted(change, every)) == [every[1].uuid]
    # Spans that the GPU lacks are of another moment.
    stale = {every[0].uuid: [[0, 4]], every[1].uuid: [[0, 1]]}
    decision = decided([partitions.item("a", every, stale)], [pod("p", "1g.5gb")])
    assert why(decision)[0] is Wait.UNUSABLE


@pytest.mark.parametrize("instances", [EMPTY, ["7g.40gb@0"], ["3g.20gb@0*"]])
def test_gpu_with_a_fault_gets_no_new_instance_and_stays_as_it_is(
    instances: Sequence[str],
) -> None:
    healthy = partitions.gpus("a", instances, EMPTY)
    fault = dataclasses.replace(healthy[0], recovery_action=model.RecoveryAction.GPU_RESET)
    every, use = (fault, healthy[1]), partitions.used(healthy, instances, EMPTY)
    one = partitions.item("a", model.ObservedGpus(every), use)
    change = only(decided([one], [pod("p", "1g.5gb")]))

    assert change.why == "room for 1 pod on GPU 1"
    assert partitions.wanted(change, every)[fault.uuid] == samples.want(
        {text.rstrip("*"): 1 for text in instances}
    )
    alone = partitions.item("a", model.ObservedGpus([fault]), use)
    assert why(decided([alone], [pod("p", "1g.5gb")])) == (
        Wait.UNUSABLE,
        "it waits for a (its GPUs with MIG need recovery from a fault)",
    )


def test_what_no_node_can_have_is_unmet_with_what_would_be_needed() -> None:
    nodes = [node("a", ["7g.40gb@0*"]), node("b", ["7g.40gb@0*"], spec={"unschedulable": True})]
    pods = [pod("x", "7g.80gb"), pod("y", "3x3g.20gb"), pod("z", "7g.40gb", "1g.5gb")]
    decision = decided(nodes, pods)
    assert {each.pod.name: each.message for each in decision.unmet} == {
        "x": "it needs a node with room for 1x 7g.80gb, and no opted-in node has that even if "
        "idle: a (its GPUs have no profile 7g.80gb); b (the node is cordoned)",
        "y": "it needs a node with room for 3x 3g.20gb, and no opted-in node has that even if "
        "idle: a (its GPUs can have at most 2x 3g.20gb); b (the node is cordoned)",
        "z": "it needs a node with room for 1x 7g.40gb, 1x 1g.5gb, and no opted-in node has "
        "that even if idle: a (its GPUs cannot have all of it together); b (the node is cordoned)",
    }


def test_only_missing_mig_devices_are_made_room_for() -> None:
    hungry = pod("p", "1g.5gb", requests={"cpu": "60"})
    decision = decided([node("a", EMPTY)], [hungry, pod("q", node="a", requests={"cpu": "8"})])
    assert why(decision) == (Wait.IN_USE, "it waits for a (too little cpu is available)")
    decision = decided([node("a", EMPTY)], [pod("p", "1g.5gb", requests={"cpu": "65"})])
    assert "a (too little cpu)" in decision.unmet[0].message


def test_a_pod_that_asks_for_an_absurd_number_of_devices_costs_nothing() -> None:
    decision = decided([node("a", EMPTY)], [pod("p", f"{2**62}x1g.5gb"), pod("q", "7g.40gb")])
    assert [each.name for each in only(decision).pods] == ["q"]
    assert "at most 7x 1g.5gb" in decision.unmet[0].message


def test_a_node_that_is_not_ready_is_waited_for_in_spite_of_its_taints() -> None:
    taints = [
        {"key": f"node.kubernetes.io/{why}", "effect": effect}
        for why in ("not-ready", "unreachable")
        for effect in ("NoSchedule", "NoExecute")
    ]
    decision = decided(
        [node("a", EMPTY, is_ready=False, spec={"taints": taints})], [pod("p", "7g.40gb")]
    )
    assert why(decision) == (Wait.UNUSABLE, "it waits for a (it is not ready)")


def test_a_pod_that_a_node_of_others_serves_is_not_unmet() -> None:
    fixed = node("fixed", ["7g.40gb@0"], labels={well_known.PARTITIONING_LABEL: ""})
    decision = decided([fixed], [pod("p", "7g.40gb"), pod("q", "7g.40gb", age_s=1)])
    assert [(each.pod.name, each.reason) for each in decision.waiting] == [
        ("p", Wait.SCHEDULER),
        ("q", Wait.IN_USE),
    ]


def requested(name: str, change: decisions.Change, **status: str) -> dict[str, Any]:
    """Return a node as it is after a request, with an agent that reports so."""
    (layout,) = config.parse(change.layout, source="x").layouts.values()
    asked = custom_layouts.Custom(node_name=name, text=change.layout)
    report = {
        "config": "custom",
        "configHash": layout.content_hash,
        "annotationHash": asked.annotation_hash,
        **status,
    }
    return node(
        name,
        EMPTY,
        labels={
            well_known.CONFIG_LABEL: "custom",
            well_known.STATE_LABEL: status.get("state", ""),
        },
        annotations={
            well_known.LAYOUT_ANNOTATION: change.layout,
            **({well_known.STATUS_ANNOTATION: json.dumps(report)} if status else {}),
        },
    )


def test_a_pod_waits_for_the_node_that_is_being_changed_for_it() -> None:
    before = [node("a", EMPTY), node("b", EMPTY)]
    pods = [pod("p", "7g.40gb")]
    decision = decided(before, pods)
    history = past_decisions.remember(
        past_decisions.History(), *partitions.seen(before, pods), decision, now=NOW
    )
    during = [requested("a", only(decision)), node("b", EMPTY)]
    following = decided(during, pods, history=history, now=NOW + dt.timedelta(seconds=9))
    assert not following.changes
    assert why(following) == (Wait.SCHEDULER, "node a is being changed for it")


def test_layout_that_just_failed_is_not_requested_again_at_once() -> None:
    change = only(decided([node("a", EMPTY)], [pod("p", "7g.40gb")]))
    failed = requested("a", change, state="failed", finishedAt=NOW.isoformat())
    soon = NOW + dt.timedelta(seconds=290)
    decision = decided([failed], [pod("p", "7g.40gb")], now=soon)
    assert not decision.changes
    assert why(decision) == (
        Wait.UNUSABLE,
        "it waits for a (its agent failed the layout for it)",
    )
    assert decided([failed], [pod("p", "3g.20gb")], now=soon).changes


def test_layout_from_which_the_gpus_drifted_is_requested_again() -> None:
    pods = [pod("p", "7g.40gb")]
    change = only(decided([node("a", EMPTY)], pods))
    drifted = requested("a", change, state="failed", reason="Drifted", finishedAt=NOW.isoformat())
    assert not decided([drifted], pods, now=NOW + dt.timedelta(seconds=290)).changes
    again = only(decided([drifted], pods, now=LATER))
    assert (again.content_hash, again.layout != change.layout) == (change.content_hash, True)


@pytest.mark.parametrize(
    ("reason", "is_replaced"), [("GpuUnreachable", True), ("Internal", False)]
)
def test_retry_for_an_unreachable_gpu_does_not_block_the_others(
    reason: str, *, is_replaced: bool
) -> None:
    change = only(decided([node("a", EMPTY, EMPTY)], [pod("p", "7g.40gb")]))
    retried = requested("a", change, state="failed", reason=reason, retryAt=NOW.isoformat())
    decision = decided([retried], [pod("p", "7g.40gb")], now=LATER)
    assert bool(decision.changes) is is_replaced
    assert is_replaced or why(decision)[1] == "it waits for a (its agent retries layout custom)"


def test_layout_that_is_retried_for_a_lost_gpu_is_not_withdrawn() -> None:
    before, pods = [node("a", EMPTY)], [pod("p", "7g.40gb")]
    first = decided(before, pods)
    history = past_decisions.remember(
        past_decisions.History(), *partitions.seen(before, pods), first, now=NOW
    )
    retried = requested(
        "a", only(first), state="failed", reason="GpuUnreachable", retryAt=NOW.isoformat()
    )
    assert not decided([retried], [], history=history, now=LATER).changes


def test_layout_that_just_failed_keeps_no_other_pod_waiting() -> None:
    pods = [pod("p", "7g.40gb"), pod("q", "1g.5gb", age_s=5)]
    change = only(decided([node("a", EMPTY)], pods))
    failed = requested("a", change, state="failed", finishedAt=NOW.isoformat())
    decision = decided([failed], pods, now=NOW + dt.timedelta(seconds=290))
    assert [each.name for each in only(decision).pods] == ["q"]
    assert [each.pod.name for each in decision.waiting] == ["p"]


def test_a_refused_request_is_withdrawn_once_no_pod_needs_it() -> None:
    before, pods = [node("a", EMPTY)], [pod("p", "7g.40gb")]
    change = only(decided(before, pods))
    history = past_decisions.remember(
        past_decisions.History(), *partitions.seen(before, pods), decided(before, pods), now=NOW
    )
    failed = requested("a", change, state="failed", finishedAt="2026-03-01T00:00:00+00:00")

    soon = NOW + dt.timedelta(seconds=100)
    assert not decided([failed], pods, history=history, now=soon).changes
    withdrawal = only(decided([failed], [], history=history, now=LATER))

    every = partitions.gpus("a", EMPTY)
    assert partitions.wanted(withdrawal, every) == {every[0].uuid: samples.want({})}
    assert (withdrawal.created, withdrawal.destroyed, withdrawal.pods) == ({}, {}, ())
    assert withdrawal.why == "no pod needs the request that its agent failed"


def test_one_decision_makes_few_changes_so_that_it_ends_before_its_lease() -> None:
    nodes = [node(f"n{number}", EMPTY) for number in range(20)]
    pods = [pod(f"p{number}", "7g.40gb") for number in range(20)]
    decision = decided(nodes, pods)

    assert len(decision.changes) == 8
    assert {each.reason for each in decision.waiting} == {Wait.LIMITED}


def test_a_persons_refused_request_is_left_alone() -> None:
    change = only(decided([node("a", EMPTY)], [pod("p", "7g.40gb")]))
    failed = requested("a", change, state="failed", finishedAt="2026-03-01T00:00:00+00:00")
    other = past_decisions.History(changed_at={"a": NOW}, requested={"a": "another"})

    assert not decided([failed], [], history=other, now=LATER).changes


def test_change_names_the_unchanged_gpus_too() -> None:
    instances = (["3g.20gb@4*", "1g.5gb@0"], EMPTY, ["2g.10gb@0"])
    every = partitions.gpus("a", *instances)
    change = only(decided([node("a", *instances)], [pod("p", "7g.40gb")]))

    assert partitions.wanted(change, every) == {
        every[0].uuid: samples.want({"3g.20gb@4": 1, "1g.5gb": 1}),
        every[1].uuid: samples.want({"7g.40gb": 1}),
        every[2].uuid: samples.want({"2g.10gb": 1}),
    }
    assert change.why == "room for 1 pod on GPU 1"


def test_room_that_the_scheduler_does_not_use_is_not_kept_for_ever() -> None:
    nodes, pods = [node("a", ["7g.40gb@0"])], [pod("p", "7g.40gb"), pod("q", "1g.5gb", age_s=5)]
    first = decided(nodes, pods)
    history = past_decisions.remember(
        past_decisions.History(), *partitions.seen(nodes, pods), first, now=NOW
    )
    assert not first.changes
    second = decided(nodes, pods, history=history, now=LATER)
    assert [each.name for each in only(second).pods] == ["q"]
    assert why(second)[0] is Wait.NOT_SCHEDULED
    history = past_decisions.remember(history, *partitions.seen(nodes, pods), second, now=LATER)
    third = decided(nodes, pods, history=history, now=LATER + dt.timedelta(seconds=300))
    assert not third.changes


def test_pod_that_never_uses_its_room_costs_fewer_and_fewer_changes() -> None:
    nodes = {f"n{n}": node(f"n{n}", EMPTY) for n in range(20)}
    pods, history, changed_at = [pod("phantom", "7g.40gb")], past_decisions.History(), []
    for minute in range(121):
        now = NOW + dt.timedelta(minutes=minute)
        decision = decided(nodes.values(), pods, history=history, now=now)
        seen = partitions.seen(nodes.values(), pods)
        history = past_decisions.remember(history, *seen, decision, now=now)
        for change in decision.changes:
            changed_at.append(minute)
            nodes[change.node] = node(change.node, ["7g.40gb@0"])
    assert changed_at[:2] == [0, 6]
    assert len(changed_at) <= 4
    assert history.unused["uid-phantom"].count >= 2


def test_node_on_which_pods_are_preempted_is_not_changed() -> None:
    nodes = [node("a", ["3g.20gb@0*"]), node("b", ["7g.40gb@0*"])]
    preempting = pod("p", "3g.20gb", spec={"priority": 9})
    preempting["status"]["nominatedNodeName"] = "a"
    decision = decided(nodes, [preempting, pod("q", "1g.5gb")])
    assert not decision.changes
    reasons = {each.pod.name: (each.reason, each.message) for each in decision.waiting}
    assert reasons["p"] == (Wait.SCHEDULER, "the scheduler preempts pods on node a for it")
    assert reasons["q"][0] is Wait.CHANGING
    preempting["status"]["nominatedNodeName"] = "b"
    assert decided(nodes, [preempting, pod("q", "1g.5gb")]).changes


def test_as_many_gpus_are_kept_for_a_pod_as_it_asks_for() -> None:
    nodes = [node("a", ["1g.5gb@0*"], ["1g.5gb@0*"], ["1g.5gb@0*", "3g.20gb@4*"])]
    pods = [pod("large", "2x7g.40gb", age_s=700), pod("small", "3g.20gb")]
    assert not decided(nodes, pods).changes
    more = [node("a", *(["1g.5gb@0*"] for _ in range(3)))]
    assert [each.name for each in only(decided(more, pods)).pods] == ["small"]


def test_idle_instances_become_devices_for_expected_pods() -> None:
    nodes = [node("a", ["7g.40gb@0*"], SMALL), node("b", SMALL, SMALL)]
    likely = [pod("large", "7g.40gb"), pod("small", "1g.5gb"), pod("larger", "2x7g.40gb")]

    # The small pod's device on node a stays ready, and one node changes at a time.
    change = only(decided(nodes, [], expected=likely))

    assert (change.pods, change.node, text(change.created)) == ((), "b", "1x 7g.40gb")
    assert not decided(nodes, [], expected=likely[1:2]).changes


def test_no_node_is_prepared_while_a_pod_waits_or_where_none_can_be() -> None:
    idle, large = [node("a", SMALL)], [pod("large", "7g.40gb")]
    ready, never = pod("p", "1g.5gb"), pod("p", "7x7g.40gb")

    assert not decided(idle, [ready], expected=large).changes
    assert not decided(idle, [never], expected=large).changes
    assert not decided([node("a", ["1g.5gb@0*"])], [], expected=large).changes
    assert not decided(idle, [], expected=large, reserved={samples.profile("1g.5gb"): 1}).changes


def test_idle_instances_return_to_the_base_layout_without_demand() -> None:
    busy = ["1g.5gb@0*", "1g.5gb@1", "1g.5gb@2"]
    nodes = [node("a", busy, ["7g.40gb@0"])]
    every = partitions.gpus("a", busy, ["7g.40gb@0"])
    base = {
        "a": {gpu.uuid: samples.want({"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}) for gpu in every}
    }
    seen = partitions.seen(nodes, [])
    history = past_decisions.remember(
        past_decisions.History(), *seen, decisions.PartitioningDecision(), now=NOW
    )
    later: dict[str, Any] = {"history": history, "now": LATER, "base": base}
    assert not decided(nodes, [], **later).changes
    assert not decided(nodes, [], **later, merge_back_after_s=500).changes
    change = only(decided(nodes, [], **later, merge_back_after_s=300))
    assert partitions.wanted(change, every) == {
        every[0].uuid: samples.want({"1g.5gb@0": 1, "3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1}),
        every[1].uuid: samples.want({"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}),
    }
    reserved = {samples.profile("7g.40gb"): 1}
    assert not decided(nodes, [], **later, merge_back_after_s=300, reserved=reserved).changes


def test_demand_postpones_the_return_to_the_base_layout() -> None:
    nodes, pods = [node("a", SMALL)], [pod("p", "1g.5gb")]
    seen = partitions.seen(nodes, pods)
    start = past_decisions.remember(
        past_decisions.History(), *seen, decisions.PartitioningDecision(), now=NOW
    )
    asked = past_decisions.remember(start, *seen, decided(nodes, pods), now=LATER)
    assert asked.demand_at == {"a": LATER}
    gone = past_decisions.remember(asked, seen[0], (), decisions.PartitioningDecision(), now=LATER)
    assert gone.room_since == {}
    bound = partitions.seen(nodes, [pod("p", "1g.5gb", node="a")])
    end = LATER + dt.timedelta(seconds=1)
    assert past_decisions.remember(
        gone, *bound, decisions.PartitioningDecision(), now=end
    ).demand_at == {"a": end}


def test_the_layout_is_one_document_that_names_gpus_by_uuid() -> None:
    every = partitions.gpus("a", EMPTY, EMPTY)
    change = only(decided([node("a", EMPTY, EMPTY)], [pod("p", "2x7g.40gb")]))
    document = config.parse(change.layout, source="annotation")
    assert list(document.layouts) == ["on-demand"]
    assert not document.warnings
    assert layouts.render(document.layouts.values()) == json.loads(change.layout)
    assert len(document.layouts["on-demand"].rules) == 1
    assert set(partitions.wanted(change, every)) == {gpu.uuid for gpu in every}


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_storm_of_pods_is_decided_with_few_questions(are_alike: bool) -> None:  # noqa: FBT001 - a case
    nodes = [node(f"n{n:03}", *(EMPTY for _ in range(8))) for n in range(100)]
    profiles = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb", "7g.80gb")
    pods = [
        pod(f"p{n:03}", profiles[n % 5], requests={"cpu": "1m" if are_alike else f"{n}m"})
        for n in range(500)
    ]
    storm = batch.Batch(*partitions.seen(nodes, pods), {})
    assert len(storm.needs) == (5 if are_alike else 500)
    found = offers.Offers(storm)
    for position in range(100):
        offer = found.offer(position, storm.queue(range(500)), refused={})
        assert offer is not None
        assert len(offer.pods) == 19
    assert storm.search.count < 60
