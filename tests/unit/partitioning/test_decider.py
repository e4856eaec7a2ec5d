"""Which nodes are repartitioned for which pods, and what stays as it is."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.layout import layout_documents, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.batch import assumed_pods, batches, feasible_nodes
from mig_manager.core.partitioning.decision import offers, waiting
from mig_manager.core.partitioning.nodes import node_index
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, SMALL, decide, lines, node, only, pod, why
from tests.rigs.node import samples
from tests.unit.partitioning.decision_cases import BUSY, IN_USE, LARGE, OTHERS, ROOM, DecisionCase

Wait = waiting.WaitReason


def test_instances_in_use_are_pinned_and_idle_ones_kept_if_possible() -> None:
    gpus = partitions.gpus("a", ["2g.10gb@0", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    use = partitions.placements_in_use(gpus, ["2g.10gb@0*", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    change = only(decide([partitions.node_object("a", gpus, use)], [pod("p", "2g.10gb")]))
    assert change.destroyed == {samples.profile("3g.20gb"): 1}
    assert partitions.requested_gpus(change, gpus) == {
        gpus[0].uuid: samples.desired_gpu({"2g.10gb@0": 1, "2g.10gb": 1, "1g.5gb": 2})
    }


def agent_not_ready(where: str) -> dict[str, Any]:
    item = pod(
        "agent", node_name=where, metadata={"labels": {"app.kubernetes.io/name": "mig-manager"}}
    )
    item["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    return item


def taints_of(*reasons: str) -> list[dict[str, str]]:
    return [
        {"key": f"node.kubernetes.io/{reason}", "effect": effect}
        for reason in reasons
        for effect in ("NoSchedule", "NoExecute")
    ]


DECISIONS = {
    "fewest instances are destroyed": DecisionCase(
        nodes=[
            node("a", ["3g.20gb@0*", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"]),
            node("b", ["3g.20gb@0*", "3g.20gb@4"]),
        ],
        pods=[pod("p", "2g.10gb")],
        limits={"max_unavailable": "1"},
        expected=["b: 1x 2g.10gb instead of 1x 3g.20gb for p"],
    ),
    "a GPU that a large pod can have whole is begun last": DecisionCase(
        nodes=[
            node("a", ["7g.40gb@0"]),
            node("b", ["3g.20gb@0*", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"]),
        ],
        pods=[pod("p", "2g.10gb")],
        limits={"max_unavailable": "1"},
        expected=["b: 1x 2g.10gb instead of 2x 1g.5gb for p"],
    ),
    "idle instances serve where they can": DecisionCase(
        nodes=[node("a", ["3g.20gb@0"], ["3g.20gb@0"])],
        pods=[pod("p", "3g.20gb", "4g.20gb")],
        expected=["a: 1x 4g.20gb instead of 1x 3g.20gb for p"],
    ),
    "an idle instance moves where another of the same pod must be": DecisionCase(
        nodes=[node("a", ["1g.5gb@0"], ["1g.5gb@0*"])],
        pods=[pod("p", "1g.5gb", "7g.40gb")],
        expected=["a: 1x 1g.5gb, 1x 7g.40gb instead of 1x 1g.5gb for p"],
    ),
    "idle instances stay for the pod that they serve": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("small", "7x1g.5gb"), pod("large", "7g.40gb", age_s=30)],
        expected=[f"small SCHEDULER: node a {ROOM}", f"large IN_USE: {BUSY}"],
    ),
    "an instance stays for the pod that was just bound": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("new", "1g.5gb", node_name="a"), LARGE],
        expected=[f"large IN_USE: {BUSY}"],
    ),
    "two nodes do not share a pod": DecisionCase(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["3g.20gb@0*"])],
        pods=[pod("p", "2x3g.20gb")],
        expected=[f"p IN_USE: it waits for a, b ({IN_USE})"],
    ),
    "two GPUs of a node share a pod": DecisionCase(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["3g.20gb@0*"], ["3g.20gb@0*"])],
        pods=[pod("p", "2x3g.20gb")],
        expected=["b: 2x 3g.20gb for p"],
    ),
    "the first in order precedes more pods elsewhere": DecisionCase(
        nodes=[node("one", EMPTY), node("two", EMPTY, labels={"pool": "x"})],
        pods=[
            pod("first", "4g.20gb", age_s=90),
            *(pod(f"p{n}", "1g.5gb", spec={"nodeSelector": {"pool": "x"}}) for n in range(7)),
        ],
        limits={"max_unavailable": "1"},
        expected=[
            "two: 3x 1g.5gb, 1x 4g.20gb for first, p0, p1, p2",
            *(f"p{n} CHANGING: it waits for two ({OTHERS})" for n in range(3, 7)),
        ],
    ),
    "priority precedes age": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[
            pod("old", "7g.40gb", age_s=900),
            pod("p", "7g.40gb", age_s=1, spec={"priority": 10}),
        ],
        expected=[
            "a: 1x 7g.40gb for p",
            f"old CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a node that is not ready is waited for in spite of its taints": DecisionCase(
        nodes=[
            node(
                "a",
                EMPTY,
                is_ready=False,
                spec={"taints": taints_of("not-ready", "unreachable")},
            )
        ],
        pods=[LARGE],
        expected=["large UNUSABLE: it waits for a (it is not ready)"],
    ),
    "a node without on-demand partitioning serves what it has": DecisionCase(
        nodes=[node("fixed", ["7g.40gb@0"], labels={well_known.PARTITIONING_LABEL: ""})],
        pods=[LARGE, pod("q", "7g.40gb", age_s=1)],
        expected=[
            f"large SCHEDULER: node fixed {ROOM}",
            "q IN_USE: it waits for fixed (its devices are in use)",
        ],
    ),
    "a node whose agent has not noticed a request has room": DecisionCase(
        nodes=[
            node("a", ["1g.5gb@0"], labels={well_known.CONFIG_LABEL: "mine"}),
            node("b", ["7g.40gb@0"]),
        ],
        pods=[pod("p", "1g.5gb")],
        expected=[f"p SCHEDULER: node a {ROOM}"],
    ),
    "a node that an agent drains has no room": DecisionCase(
        nodes=[
            node(
                "a",
                ["1g.5gb@0*", "3g.20gb@4"],
                labels={well_known.STATE_LABEL: "pending"},
                spec={"taints": [{"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"}]},
            ),
            node("b", ["7g.40gb@0"]),
        ],
        pods=[pod("p", "3g.20gb")],
        expected=["b: 1x 3g.20gb instead of 1x 7g.40gb for p"],
    ),
    "a node without on-demand partitioning has no room in a change": DecisionCase(
        nodes=[
            node(
                "fixed",
                ["3g.20gb@0"],
                labels={
                    well_known.PARTITIONING_LABEL: "",
                    well_known.CONFIG_LABEL: "mine",
                    well_known.STATE_LABEL: "pending",
                },
            )
        ],
        pods=[pod("p", "3g.20gb")],
        expected=["p CHANGING: it waits for fixed (its agent works on layout mine)"],
    ),
    "the agent of a node is not ready": DecisionCase(
        nodes=[node("a", EMPTY), node("b", EMPTY)],
        pods=[agent_not_ready("a"), pod("q", "1g.5gb")],
        expected=["b: 1x 1g.5gb for q"],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_decision_names_changes_and_why_other_pods_wait(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected


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
    (line,) = lines(decide([node("a", SMALL, **changed)], [LARGE]))
    assert message in line


def test_free_device_of_a_gpu_of_unknown_use_serves_a_pod() -> None:
    whole = ["7g.40gb@0"]
    gpus = partitions.gpus("a", whole, whole)
    use = partitions.placements_in_use(gpus, whole, whole)
    del use[gpus[0].uuid]
    pods = [pod("both", "7g.40gb", "1g.5gb"), pod("small", "1g.5gb", age_s=30)]
    assert lines(decide([partitions.node_object("a", gpus, use)], pods)) == [
        "a: 2x 1g.5gb instead of 1x 7g.40gb for both, small"
    ]


def test_a_gpu_of_unknown_use_or_without_mig_is_not_named() -> None:
    gpus = partitions.gpus("a", EMPTY, EMPTY)
    use: dict[str, list[model.Placement]] = {gpus[1].uuid: []}
    change = only(decide([partitions.node_object("a", gpus, use)], [pod("p", "1g.5gb")]))
    assert list(partitions.requested_gpus(change, gpus)) == [gpus[1].uuid]
    # Spans that the GPU lacks are of another moment.
    stale = {gpus[0].uuid: [model.Placement(0, 4)], gpus[1].uuid: [model.Placement(0, 1)]}
    decision = decide([partitions.node_object("a", gpus, stale)], [pod("p", "1g.5gb")])
    assert why(decision)[0] is Wait.UNUSABLE


@pytest.mark.parametrize("instances", [EMPTY, ["7g.40gb@0"], ["3g.20gb@0*"]])
def test_gpu_with_a_fault_gets_no_new_instance_and_stays_as_it_is(
    instances: Sequence[str],
) -> None:
    healthy = partitions.gpus("a", instances, EMPTY)
    fault = dataclasses.replace(healthy[0], recovery_action=model.RecoveryAction.GPU_RESET)
    gpus, use = (fault, healthy[1]), partitions.placements_in_use(healthy, instances, EMPTY)
    one = partitions.node_object("a", model.ObservedGpus(gpus), use)
    change = only(decide([one], [pod("p", "1g.5gb")]))

    assert change.why == "room for 1 pod on GPU 1"
    assert partitions.requested_gpus(change, gpus)[fault.uuid] == samples.desired_gpu(
        {instance.rstrip("*"): 1 for instance in instances}
    )
    alone = partitions.node_object("a", model.ObservedGpus([fault]), use)
    assert why(decide([alone], [pod("p", "1g.5gb")])) == (
        Wait.UNUSABLE,
        "it waits for a (its GPUs with MIG need recovery from a fault)",
    )


def test_one_decision_makes_few_changes_so_that_it_ends_before_its_lease() -> None:
    nodes = [node(f"n{number}", EMPTY) for number in range(20)]
    pods = [pod(f"p{number}", "7g.40gb") for number in range(20)]
    decision = decide(nodes, pods)

    assert len(decision.changes) == 8
    assert {each.reason for each in decision.waiting} == {Wait.LIMITED}


def test_change_names_the_unchanged_gpus_too() -> None:
    instances = (["3g.20gb@4*", "1g.5gb@0"], EMPTY, ["2g.10gb@0"])
    gpus = partitions.gpus("a", *instances)
    change = only(decide([node("a", *instances)], [pod("p", "7g.40gb")]))

    assert partitions.requested_gpus(change, gpus) == {
        gpus[0].uuid: samples.desired_gpu({"3g.20gb@4": 1, "1g.5gb": 1}),
        gpus[1].uuid: samples.desired_gpu({"7g.40gb": 1}),
        gpus[2].uuid: samples.desired_gpu({"2g.10gb": 1}),
    }
    assert change.why == "room for 1 pod on GPU 1"


def test_the_layout_is_one_document_that_names_gpus_by_uuid() -> None:
    gpus = partitions.gpus("a", EMPTY, EMPTY)
    change = only(decide([node("a", EMPTY, EMPTY)], [pod("p", "2x7g.40gb")]))
    document = layout_parser.parse(change.layout, source="annotation")
    assert list(document.layouts) == ["on-demand"]
    assert not document.warnings
    assert layout_documents.render(document.layouts.values()) == json.loads(change.layout)
    assert len(document.layouts["on-demand"].rules) == 1
    assert set(partitions.requested_gpus(change, gpus)) == {gpu.uuid for gpu in gpus}


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_storm_of_pods_is_decided_with_few_questions(are_alike: bool) -> None:  # noqa: FBT001 - a case
    nodes = [node(f"n{n:03}", *(EMPTY for _ in range(8))) for n in range(100)]
    profiles = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb", "7g.80gb")
    pods = [
        pod(f"p{n:03}", profiles[n % 5], requests={"cpu": "1m" if are_alike else f"{n}m"})
        for n in range(500)
    ]
    parsed_nodes, pending = partitions.parse_cluster(nodes, pods)
    index = node_index.NodeIndex(parsed_nodes)
    storm = batches.Batch(index, pending, {})
    assert len(storm.groups) == (5 if are_alike else 500)
    feasible = feasible_nodes.FeasibleNodes(index, storm, {}, assumed_pods.AssumedPods(index))
    every_offer = offers.Offers(index, storm, feasible)
    for position in range(100):
        offer = every_offer.offer(position, storm.queue(range(500)), skipped={})
        assert offer is not None
        assert len(offer.pods) == 19
    assert index.search.count < 60
