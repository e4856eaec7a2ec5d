"""What a decision makes of the past: requests, their outcomes, unused room and demand."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.layout import custom_layouts, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.decision import decisions, situations, waiting
from mig_manager.core.records import inventory_codec, run_status
from tests.rigs import api_objects
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, NOW, SMALL, decide, lines, node, only, pod, why
from tests.rigs.node import samples

Wait = waiting.WaitReason
SOON = NOW + dt.timedelta(seconds=290)
NOTHING = decisions.PartitioningDecision()
NO_HISTORY = situations.History()
LATER = NOW + dt.timedelta(seconds=400)


def requested_node(
    name: str,
    change: decisions.NodeChange,
    gpus: Sequence[Sequence[str]] = (EMPTY,),
    **failed: str,
) -> dict[str, Any]:
    """Return a node after a request, whose agent has not reported, or has failed it so."""
    (layout,) = layout_parser.parse(change.layout, source="x").layouts.values()
    custom = custom_layouts.CustomRequest(node_name=name, text=change.layout)
    text = api_objects.a_status(
        "custom",
        run_status.State.FAILED,
        configHash=layout.content_hash,
        annotationHash=custom.annotation_hash,
        **failed,
    )
    return node(
        name,
        *gpus,
        labels={
            well_known.CONFIG_LABEL: "custom",
            well_known.STATE_LABEL: "failed" if failed else "",
        },
        annotations={
            well_known.LAYOUT_ANNOTATION: change.layout,
            **(api_objects.annotations_of_agent(status_text=text) if failed else {}),
        },
    )


def remember(
    nodes: Iterable[dict[str, Any]],
    pods: Iterable[dict[str, Any]],
    decision: decisions.PartitioningDecision = NOTHING,
    history: situations.History = NO_HISTORY,
    *,
    now: dt.datetime = NOW,
) -> situations.History:
    return partitions.remember(nodes, pods, decision, now=now, history=history)


LARGE = pod("large", "7g.40gb")
FIRST = decide([node("a", EMPTY)], [LARGE])
ONE_GPU = only(FIRST)
TWO_GPUS = only(decide([node("a", EMPTY, EMPTY)], [LARGE]))
AFTER_FIRST = remember([node("a", EMPTY)], [LARGE], FIRST)
BUSY_GPUS = (["1g.5gb@0*", "1g.5gb@4"], ["7g.40gb@0*"])
OTHER_BUSY_NODE = node("b", ["3g.20gb@0*"], ["3g.20gb@0*"])
DRAINING_HOLD = only(decide([node("a", *BUSY_GPUS), OTHER_BUSY_NODE], [LARGE]))
NOMINATED = pod("p", "7g.40gb")
NOMINATED["status"]["nominatedNodeName"] = "a"
OF_A_PERSON = dataclasses.replace(ONE_GPU, layout=ONE_GPU.layout.replace("on-demand", "mine"))
FAILED = {"finishedAt": NOW.isoformat()}
PENDING = {well_known.STATE_LABEL: "pending"}
LOST = {"reason": "GpuUnreachable", "retryAt": NOW.isoformat()}
UNUSED = "it had room, and the scheduler did not place the pod"
BLOCKED = "large UNUSABLE: it waits for a (its agent failed the layout for it)"


@pytest.mark.parametrize(
    ("nodes", "pods", "when", "expected"),
    [
        pytest.param(
            [requested_node("a", ONE_GPU), node("b", EMPTY)],
            [LARGE],
            {"now": NOW + dt.timedelta(seconds=9), "history": AFTER_FIRST},
            ["large SCHEDULER: node a is being changed for it"],
            id="a pod waits for the node that is being changed for it",
        ),
        pytest.param(
            [
                node("a", EMPTY, labels={well_known.CONFIG_LABEL: "x", **PENDING}),
                node("b", EMPTY),
            ],
            [LARGE],
            {"now": SOON, "history": AFTER_FIRST, "max_unavailable": "2"},
            ["b: 1x 7g.40gb for large"],
            id="a pod does not wait for a node that a person changes meanwhile",
        ),
        pytest.param(
            [requested_node("a", ONE_GPU)],
            [LARGE],
            {"now": LATER, "history": AFTER_FIRST},
            ["large CHANGING: it waits for a (its agent has not reported on layout custom)"],
            id="a pod did not leave unused what a silent agent has not made",
        ),
        pytest.param(
            [node("a", ["3g.20gb@0"]), node("b", ["3g.20gb@0"]), node("c", ["7g.40gb@0"])],
            [pod("p", "3g.20gb")],
            {"now": LATER, "history": situations.History(room_since={"uid-p": {"a": NOW}})},
            ["c: 1x 3g.20gb instead of 1x 7g.40gb for p"],
            id="a pod that did not use its room waits for no other idle device",
        ),
        pytest.param(
            [node("a", ["7g.40gb@0*"]), node("b", EMPTY)],
            [NOMINATED],
            {"now": LATER, "history": situations.History(room_since={"uid-p": {"a": NOW}})},
            ["b: 1x 7g.40gb for p"],
            id="a pod does not wait for ever for a node where pods are preempted",
        ),
        pytest.param(
            [
                *(node(name, ["3g.20gb@0"]) for name in "ab"),
                node("c", ["3g.20gb@0"], labels={well_known.PARTITIONING_LABEL: ""}),
            ],
            [pod("p", "3g.20gb")],
            {"now": LATER, "history": situations.History(room_since={"uid-p": {"a": NOW}})},
            [f"p NOT_SCHEDULED: it waits for a, b, c ({UNUSED})"],
            id="an idle device is not in use for a pod that did not use its room",
        ),
        pytest.param(
            [requested_node("a", ONE_GPU, **FAILED)],
            [LARGE],
            {"now": SOON},
            [BLOCKED],
            id="a layout that just failed is not requested again",
        ),
        pytest.param(
            [requested_node("a", ONE_GPU, **FAILED)],
            [LARGE, pod("q", "1g.5gb", age_s=5)],
            {"now": SOON},
            [
                "a: 1x 1g.5gb for q",
                "large CHANGING: it waits for a (it is being changed for other pods)",
            ],
            id="a layout that just failed keeps no other pod waiting",
        ),
        pytest.param(
            [requested_node("a", ONE_GPU, **FAILED, reason="Drifted")],
            [LARGE],
            {"now": SOON},
            [BLOCKED],
            id="a layout just drifted",
        ),
        pytest.param(
            [requested_node("a", DRAINING_HOLD, BUSY_GPUS, **FAILED), OTHER_BUSY_NODE],
            [LARGE],
            {"now": SOON},
            ["large IN_USE: it waits for a, b (too much of its GPUs is in use)"],
            id="a hold's layout that just failed is not replaced",
        ),
        pytest.param(
            [requested_node("a", TWO_GPUS, **LOST)],
            [LARGE],
            {"now": LATER},
            ["a: 1x 7g.40gb for large"],
            id="a retry for an unreachable GPU does not block the others",
        ),
        pytest.param(
            [requested_node("a", TWO_GPUS, **LOST | {"reason": "Internal"})],
            [LARGE],
            {"now": LATER},
            ["large UNUSABLE: it waits for a (its agent retries layout custom)"],
            id="another retry",
        ),
        pytest.param(
            [requested_node("a", ONE_GPU, **LOST)],
            [],
            {"now": LATER, "history": AFTER_FIRST},
            [],
            id="a layout that is retried for a lost GPU is not replaced",
        ),
        pytest.param(
            [requested_node("a", OF_A_PERSON, **FAILED)],
            [],
            {"now": LATER},
            [],
            id="a person's refused request is not replaced",
        ),
    ],
)
def test_a_decision_follows_from_earlier_requests(
    nodes: list[dict[str, Any]],
    pods: list[dict[str, Any]],
    when: dict[str, Any],
    expected: list[str],
) -> None:
    assert lines(decide(nodes, pods, **when)) == expected


def test_layout_from_which_the_gpus_drifted_is_requested_again() -> None:
    drifted = requested_node("a", ONE_GPU, **FAILED, reason="Drifted")
    again = only(decide([drifted], [LARGE], now=LATER))
    assert (again.content_hash, again.layout != ONE_GPU.layout) == (ONE_GPU.content_hash, True)


def test_a_refused_request_is_replaced_once_no_pod_needs_it() -> None:
    failed = requested_node("a", ONE_GPU, **FAILED)
    assert not decide([failed], [LARGE], history=AFTER_FIRST, now=SOON).changes
    replacement = only(decide([failed], [], history=AFTER_FIRST, now=LATER))
    # Also of a leader that has ended.
    assert only(decide([failed], [], now=LATER)) == replacement

    gpus = partitions.gpus("a", EMPTY)
    assert partitions.requested_gpus(replacement, gpus) == {gpus[0].uuid: samples.desired_gpu({})}
    assert (replacement.created, replacement.destroyed, replacement.pods) == ({}, {}, ())
    assert replacement.why == "no pod needs the request that its agent failed"


def test_a_refused_request_is_replaced_beside_an_empty_gpu_instance() -> None:
    failed = requested_node("a", ONE_GPU, **FAILED)
    annotations = failed["metadata"]["annotations"]
    (gpu,) = partitions.gpus("a", ["1g.5gb@0"])
    empty = dataclasses.replace(gpu.gpu_instances[0], compute_instances=())
    gpus = model.ObservedGpus([dataclasses.replace(gpu, gpu_instances=(empty,))])
    annotations[well_known.GPUS_ANNOTATION] = inventory_codec.to_json(gpus)
    assert only(decide([failed], [], now=LATER)).why.startswith("no pod needs the request")


def test_room_that_the_scheduler_does_not_use_is_not_kept_for_ever() -> None:
    nodes, pods = [node("a", ["7g.40gb@0"])], [pod("p", "7g.40gb"), pod("q", "1g.5gb", age_s=5)]
    first = decide(nodes, pods)
    history = remember(nodes, pods, first)
    assert not first.changes
    second = decide(nodes, pods, history=history, now=LATER)
    assert [each.name for each in only(second).pods] == ["q"]
    assert why(second)[0] is Wait.NOT_SCHEDULED
    history = remember(nodes, pods, second, history, now=LATER)
    third = decide(nodes, pods, history=history, now=LATER + dt.timedelta(seconds=300))
    assert not third.changes
    history = remember(nodes, pods, third, history, now=LATER + dt.timedelta(seconds=300))
    fourth = decide(nodes, pods, history=history, now=LATER + dt.timedelta(seconds=601))
    assert [each.name for each in only(fourth).pods] == ["q"]


@pytest.mark.slow
def test_a_pod_that_never_uses_its_room_causes_ever_fewer_changes() -> None:
    nodes = {f"n{n}": node(f"n{n}", EMPTY) for n in range(20)}
    pods = [pod("phantom", "7g.40gb")]
    history = situations.History()
    changed_at: list[int] = []
    for minute in range(121):
        now = NOW + dt.timedelta(minutes=minute)
        decision = decide(nodes.values(), pods, history=history, now=now)
        history = remember(nodes.values(), pods, decision, history, now=now)
        for change in decision.changes:
            changed_at.append(minute)
            nodes[change.node] = node(change.node, ["7g.40gb@0"])
    assert changed_at[:2] == [0, 6]
    assert len(changed_at) <= 4
    assert history.ignored["uid-phantom"].count >= 2


def test_idle_instances_return_to_the_base_layout_without_demand() -> None:
    busy = ["1g.5gb@0*", "1g.5gb@1", "1g.5gb@2"]
    nodes = [node("a", busy, ["7g.40gb@0"])]
    gpus = partitions.gpus("a", busy, ["7g.40gb@0"])
    base = {
        "a": {
            gpu.uuid: samples.desired_gpu({"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2})
            for gpu in gpus
        }
    }
    history = remember(nodes, [])
    later: dict[str, Any] = {"history": history, "now": LATER, "base": base}
    assert not decide(nodes, [], **later).changes
    assert not decide(nodes, [], **later, merge_back_after_s=500).changes
    change = only(decide(nodes, [], **later, merge_back_after_s=300))
    assert partitions.requested_gpus(change, gpus) == {
        gpus[0].uuid: samples.desired_gpu(
            {"1g.5gb@0": 1, "3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1}
        ),
        gpus[1].uuid: samples.desired_gpu({"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}),
    }
    arrived = [pod("p", "7g.40gb")]
    assert not decide(nodes, arrived, **later, merge_back_after_s=300).changes
    reserved = {samples.profile("7g.40gb"): 1}
    assert not decide(nodes, [], **later, merge_back_after_s=300, reserved=reserved).changes
    changing = node("b", EMPTY, labels={well_known.STATE_LABEL: "pending"})
    full = decide([*nodes, changing], [], **later, merge_back_after_s=300, max_unavailable="1")
    assert not full.changes


def test_pod_waits_for_instances_in_use_beside_a_failed_merge_back() -> None:
    instances = ["1g.5gb@0*", "1g.5gb@1"]
    nodes = [node("a", instances)]
    (gpu,) = partitions.gpus("a", instances)
    past: dict[str, Any] = {"history": remember(nodes, []), "now": LATER}
    base = {"a": {gpu.uuid: samples.desired_gpu({"1g.5gb": 1})}}
    merging = decide(nodes, [LARGE], **past, base=base, merge_back_after_s=300)
    being_changed = (Wait.CHANGING, "it waits for a (it is being changed)")
    assert why(merging) == being_changed

    replacing = decide(
        [requested_node("a", only(merging), [instances], **FAILED)], [LARGE], **past
    )
    assert why(replacing) == being_changed

    failed = requested_node("a", only(replacing), [instances], **FAILED)
    decision = decide([failed], [LARGE], now=SOON)
    assert not decision.changes
    assert why(decision) == (Wait.IN_USE, "it waits for a (too much of its GPUs is in use)")


def test_demand_postpones_the_return_to_the_base_layout() -> None:
    nodes, pods = [node("a", SMALL)], [pod("p", "1g.5gb")]
    later = remember(nodes, pods, decide(nodes, pods), remember(nodes, pods), now=LATER)
    assert later.demand_at == {"a": LATER}
    gone = remember(nodes, [], history=later, now=LATER)
    assert gone.room_since == {}
    bound, end = [pod("p", "1g.5gb", node_name="a")], LATER + dt.timedelta(seconds=1)
    assert remember(nodes, bound, history=gone, now=end).demand_at == {"a": end}
