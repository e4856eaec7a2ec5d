"""Which nodes are repartitioned for which pods, and what stays as it is."""

import dataclasses
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from mig_manager.core import model
from mig_manager.core.layout import layout_documents, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import assumed_pods, batches, feasible_nodes
from mig_manager.core.partitioning.decision import offers, situations, waiting
from mig_manager.core.partitioning.nodes import node_index
from tests.rigs import api_objects
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, NOW, SMALL, decide, lines, node, only, pod, why
from tests.rigs.node import samples

Wait = waiting.WaitReason
LATER = NOW + dt.timedelta(seconds=400)


def test_instances_in_use_are_pinned_and_idle_ones_kept_if_possible() -> None:
    gpus = partitions.gpus("a", ["2g.10gb@0", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    use = partitions.placements_in_use(gpus, ["2g.10gb@0*", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4"])
    change = only(decide([partitions.node_object("a", gpus, use)], [pod("p", "2g.10gb")]))
    assert change.destroyed == {samples.profile("3g.20gb"): 1}
    assert partitions.requested_gpus(change, gpus) == {
        gpus[0].uuid: samples.desired_gpu({"2g.10gb@0": 1, "2g.10gb": 1, "1g.5gb": 2})
    }


def preempting(where: str, *, devices: Sequence[str] = ("3g.20gb",)) -> dict[str, Any]:
    """Return a pod for which the scheduler preempts pods on a node."""
    nominated = pod("p", *devices, spec={"priority": 9})
    nominated["status"]["nominatedNodeName"] = where
    return nominated


def not_counted(nominated: dict[str, Any]) -> dict[str, Any]:
    nominated["metadata"]["labels"] = {well_known.PARTITIONING_LABEL: demand.OFF}
    return nominated


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


SIX_ONES = [f"1g.5gb@{start}" for start in range(6)]
TWO_ONES = {samples.profile("1g.5gb"): 2}
CHANGED = situations.History(
    requests={"a": situations.Request(at=NOW - dt.timedelta(seconds=59), content_hash="")}
)
STUCK_NODES = [node("a", ["3g.20gb@0"])]
STUCK_PODS = [not_counted(preempting("a")), pod("q", "1g.5gb")]
STUCK_SINCE = partitions.remember(STUCK_NODES, STUCK_PODS, decide(STUCK_NODES, STUCK_PODS))
LARGE = pod("large", "7g.40gb")
LARGER = pod("large", "2x7g.40gb", age_s=700)
IN_USE = "too much of its GPUs is in use"
BUSY = f"it waits for a ({IN_USE})"
ON_HOLD = "it waits for a (its GPUs are on hold for another pod)"
OTHERS = "it is being changed for other pods"
ROOM = "has room: the scheduler will place the pod"


def unmet(name: str, needs: str, reason: str) -> str:
    nowhere = f"no opted-in node has that even if idle: {reason}"
    return f"{name} unmet: it needs a node with room for {needs}, and {nowhere}"


CORDONED = "b (the node is cordoned)"
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


def took(seconds: float) -> list[dict[str, Any]]:
    """Return a node whose last change took some time."""
    began = NOW - dt.timedelta(seconds=seconds)
    status = api_objects.a_status(startedAt=began.isoformat(), finishedAt=NOW.isoformat())
    return [node("a", EMPTY, annotations=api_objects.annotations_of_agent(status_text=status))]


class Decision(NamedTuple):
    """A cluster, and what is decided about it."""

    nodes: list[dict[str, Any]]
    pods: list[dict[str, Any]]
    expected: list[str]  # changes, and why other pods wait
    limits: Mapping[str, Any] = MappingProxyType({})


DECISIONS = {
    "fewest instances are destroyed": Decision(
        nodes=[
            node("a", ["3g.20gb@0*", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"]),
            node("b", ["3g.20gb@0*", "3g.20gb@4"]),
        ],
        pods=[pod("p", "2g.10gb")],
        limits={"max_unavailable": "1"},
        expected=["b: 1x 2g.10gb instead of 1x 3g.20gb for p"],
    ),
    "a GPU that a large pod can have whole is begun last": Decision(
        nodes=[
            node("a", ["7g.40gb@0"]),
            node("b", ["3g.20gb@0*", "1g.5gb@4", "1g.5gb@5", "1g.5gb@6"]),
        ],
        pods=[pod("p", "2g.10gb")],
        limits={"max_unavailable": "1"},
        expected=["b: 1x 2g.10gb instead of 2x 1g.5gb for p"],
    ),
    "idle instances serve where they can": Decision(
        nodes=[node("a", ["3g.20gb@0"], ["3g.20gb@0"])],
        pods=[pod("p", "3g.20gb", "4g.20gb")],
        expected=["a: 1x 4g.20gb instead of 1x 3g.20gb for p"],
    ),
    "an idle instance moves where another of the same pod must be": Decision(
        nodes=[node("a", ["1g.5gb@0"], ["1g.5gb@0*"])],
        pods=[pod("p", "1g.5gb", "7g.40gb")],
        expected=["a: 1x 1g.5gb, 1x 7g.40gb instead of 1x 1g.5gb for p"],
    ),
    "idle instances stay for the pod that they serve": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("small", "7x1g.5gb"), pod("large", "7g.40gb", age_s=30)],
        expected=[f"small SCHEDULER: node a {ROOM}", f"large IN_USE: {BUSY}"],
    ),
    "an instance stays for the pod that was just bound": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("new", "1g.5gb", node_name="a"), LARGE],
        expected=[f"large IN_USE: {BUSY}"],
    ),
    "two nodes do not share a pod": Decision(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["3g.20gb@0*"])],
        pods=[pod("p", "2x3g.20gb")],
        expected=[f"p IN_USE: it waits for a, b ({IN_USE})"],
    ),
    "two GPUs of a node share a pod": Decision(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["3g.20gb@0*"], ["3g.20gb@0*"])],
        pods=[pod("p", "2x3g.20gb")],
        expected=["b: 2x 3g.20gb for p"],
    ),
    "the first in order precedes more pods elsewhere": Decision(
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
    "priority precedes age": Decision(
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
    "reserved devices stay": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "4g.20gb")],
        limits={"reserved": TWO_ONES},
        expected=["a: 1x 4g.20gb instead of 4x 1g.5gb for p"],
    ),
    "no pod takes the slices of reserved devices": Decision(
        nodes=[node("a", SMALL)],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=[unmet("large", "1x 7g.40gb", "a (the reserve leaves too little of its GPUs)")],
    ),
    "pods may use the reserved devices, and others have to stay": Decision(
        nodes=[node("a", ["3g.20gb@0", "1g.5gb@4", "1g.5gb@5"])],
        pods=[pod("p", "2x3g.20gb")],
        limits={"reserved": {**TWO_ONES, samples.profile("3g.20gb"): 1}},
        expected=[unmet("p", "2x 3g.20gb", "a (the reserve leaves too little of its GPUs)")],
    ),
    "reserved devices move to another GPU": Decision(
        nodes=[node("a", ["1g.5gb@0"], ["1g.5gb@0"])],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: 2x 1g.5gb, 1x 7g.40gb instead of 1x 1g.5gb for large"],
    ),
    "many reserved devices move to other GPUs": Decision(
        nodes=[node("a", *[SIX_ONES] * 16)],
        pods=[LARGE],
        limits={"reserved": {samples.profile("1g.5gb"): 96}},
        expected=["a: 15x 1g.5gb, 1x 7g.40gb instead of 6x 1g.5gb for large"],
    ),
    "no idle GPU is on hold for a pod that lacks something else": Decision(
        nodes=[node("a", EMPTY)],
        pods=[
            pod("large", "7g.40gb", age_s=700, requests={"cpu": "60"}),
            pod("s", "1g.5gb", age_s=5),
            pod("daemon", node_name="a", requests={"cpu": "10"}),
        ],
        expected=["a: 1x 1g.5gb for s", f"large CHANGING: it waits for a ({OTHERS})"],
    ),
    "no GPU is on hold for a pod that the reserve keeps off": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("large", "7g.40gb", age_s=700), pod("s", "3g.20gb", age_s=5)],
        limits={"reserved": TWO_ONES},
        expected=[
            "a: 1x 3g.20gb instead of 3x 1g.5gb for s",
            unmet("large", "1x 7g.40gb", "a (the reserve leaves too little of its GPUs)"),
        ],
    ),
    "reserved devices are not created": Decision(
        nodes=[node("a", EMPTY)],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: 1x 7g.40gb for large"],
    ),
    "a reserved device moves out of the way": Decision(
        nodes=[node("a", ["1g.5gb@0"])],
        pods=[pod("p", "4g.20gb")],
        limits={"reserved": {samples.profile("1g.5gb"): 1}},
        expected=["a: 1x 1g.5gb, 1x 4g.20gb instead of 1x 1g.5gb for p"],
    ),
    "a node rests after a change": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED, "cooldown_s": 60.0},
        expected=["p CHANGING: it waits for a (it rests after a change for 1 s more)"],
    ),
    "a node has rested": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED, "cooldown_s": 60.0, "now": NOW + dt.timedelta(seconds=2)},
        expected=["a: 1x 1g.5gb for p"],
    ),
    "a node rests no longer than it must": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["a: 1x 1g.5gb for p"],
    ),
    "a node rests as long as its change took": Decision(
        nodes=took(20),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 20 s more)"],
    ),
    "a node rests at most a minute": Decision(
        nodes=took(900),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 60 s more)"],
    ),
    "a node rests some seconds after a quick change": Decision(
        nodes=took(0),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 5 s more)"],
    ),
    "what no node can have is unmet": Decision(
        nodes=[node("a", ["7g.40gb@0*"]), node("b", ["7g.40gb@0*"], spec={"unschedulable": True})],
        pods=[pod("x", "7g.80gb"), pod("y", "3x3g.20gb"), pod("z", "7g.40gb", "1g.5gb")],
        expected=[
            unmet("x", "1x 7g.80gb", f"a (its GPUs have no profile 7g.80gb); {CORDONED}"),
            unmet("y", "3x 3g.20gb", f"a (its GPUs can have at most 2x 3g.20gb); {CORDONED}"),
            unmet(
                "z",
                "1x 7g.40gb, 1x 1g.5gb",
                f"a (its GPUs cannot have all of it together); {CORDONED}",
            ),
        ],
    ),
    "too little cpu now": Decision(
        nodes=[node("a", EMPTY)],
        pods=[
            pod("p", "1g.5gb", requests={"cpu": "60"}),
            pod("q", node_name="a", requests={"cpu": "8"}),
        ],
        expected=["p IN_USE: it waits for a (too little cpu is available)"],
    ),
    "too little cpu ever": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb", requests={"cpu": "65"})],
        expected=[
            unmet("p", "1x 1g.5gb", "a (too little cpu)"),
        ],
    ),
    "a misspelt profile is unmet": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", requests={"nvidia.com/mig-tiny": "1"}, age_s=700), pod("q", "7g.40gb")],
        expected=[
            "a: 1x 7g.40gb for q",
            "p unmet: no MIG profile is called nvidia.com/mig-tiny",
        ],
    ),
    "an absurd number of devices costs nothing": Decision(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", f"{2**62}x1g.5gb"), pod("q", "7g.40gb")],
        expected=[
            "a: 1x 7g.40gb for q",
            unmet("p", f"{2**62}x 1g.5gb", "a (its GPUs can have at most 7x 1g.5gb)"),
        ],
    ),
    "a node that is not ready is waited for in spite of its taints": Decision(
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
    "a node without on-demand partitioning serves what it has": Decision(
        nodes=[node("fixed", ["7g.40gb@0"], labels={well_known.PARTITIONING_LABEL: ""})],
        pods=[LARGE, pod("q", "7g.40gb", age_s=1)],
        expected=[
            f"large SCHEDULER: node fixed {ROOM}",
            "q IN_USE: it waits for fixed (its devices are in use)",
        ],
    ),
    "a node whose agent has not noticed a request has room": Decision(
        nodes=[
            node("a", ["1g.5gb@0"], labels={well_known.CONFIG_LABEL: "mine"}),
            node("b", ["7g.40gb@0"]),
        ],
        pods=[pod("p", "1g.5gb")],
        expected=[f"p SCHEDULER: node a {ROOM}"],
    ),
    "a node that an agent drains has no room": Decision(
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
    "a node without on-demand partitioning has no room in a change": Decision(
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
    "the scheduler preempts pods on the node": Decision(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["7g.40gb@0*"])],
        pods=[preempting("a"), pod("q", "1g.5gb")],
        expected=[
            "p SCHEDULER: the scheduler preempts pods on node a for it",
            f"q CHANGING: it waits for a (the scheduler preempts pods on it); b ({IN_USE})",
        ],
    ),
    "the scheduler preempts pods on the node for a pod that does not count": Decision(
        nodes=STUCK_NODES,
        pods=STUCK_PODS,
        expected=["q CHANGING: it waits for a (the scheduler preempts pods on it)"],
    ),
    "the scheduler does not place the pod that does not count": Decision(
        nodes=STUCK_NODES,
        pods=STUCK_PODS,
        limits={"history": STUCK_SINCE, "now": LATER},
        expected=["a: 1x 1g.5gb for q"],
    ),
    "the agent of a node is not ready": Decision(
        nodes=[node("a", EMPTY), node("b", EMPTY)],
        pods=[agent_not_ready("a"), pod("q", "1g.5gb")],
        expected=["b: 1x 1g.5gb for q"],
    ),
    "the scheduler preempts pods on the node for a pod without MIG devices": Decision(
        nodes=[node("a", EMPTY)],
        pods=[preempting("a", devices=()), pod("q", "1g.5gb")],
        expected=["a: 1x 1g.5gb for q"],
    ),
    "the scheduler preempts pods on another node": Decision(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["7g.40gb@0*"])],
        pods=[preempting("b"), pod("q", "1g.5gb")],
        expected=[
            "a: 1x 1g.5gb for q",
            "p SCHEDULER: the scheduler preempts pods on node b for it",
        ],
    ),
    "two GPUs are on hold for a pod of two": Decision(
        nodes=[node("a", ["1g.5gb@0*"], ["1g.5gb@0*"], ["1g.5gb@0*", "3g.20gb@4*"])],
        pods=[LARGER, pod("small", "3g.20gb")],
        expected=[
            f"large IN_USE: {BUSY}",
            f"small IN_USE: {ON_HOLD}",
        ],
    ),
    "no more GPUs are on hold than a pod requests": Decision(
        nodes=[node("a", ["1g.5gb@0*"], ["1g.5gb@0*"], ["1g.5gb@0*"])],
        pods=[LARGER, pod("small", "3g.20gb")],
        expected=[
            "a: 1x 3g.20gb for small",
            f"large CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a pod behind gets an instance on a GPU until a large pod has waited a while": Decision(
        nodes=HALF,
        pods=[pod("large", "7g.40gb", age_s=10), *SMALLER],
        expected=["a: 2x 3g.20gb for s0, s1", f"large CHANGING: it waits for a ({OTHERS})"],
    ),
    "a pod behind gets no instance on a GPU on hold": Decision(
        nodes=HALF,
        pods=[pod("large", "7g.40gb", age_s=30), *SMALLER],
        expected=[
            "a: 1x 3g.20gb for s0",
            f"large CHANGING: it waits for a ({OTHERS})",
            f"s1 CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a busy cluster holds no GPU soon": Decision(
        nodes=BUSY_NODE,
        pods=[pod("large", "7g.40gb", age_s=500), pod("s", "1g.10gb", age_s=5)],
        expected=[
            "a: 1x 1g.10gb instead of 1x 1g.5gb for s",
            f"large CHANGING: it waits for a ({OTHERS})",
        ],
    ),
    "a busy cluster holds a GPU late and destroys nothing": Decision(
        nodes=BUSY_NODE,
        pods=[pod("large", "7g.40gb", age_s=700), pod("s", "1g.10gb", age_s=5)],
        expected=[
            f"large IN_USE: {BUSY}",
            "s IN_USE: it waits for a (its GPUs are on hold for another pod)",
        ],
    ),
    "idle instances are not destroyed before a GPU is on hold": Decision(
        nodes=FREE_NODES,
        pods=[pod("large", "7g.40gb", age_s=10)],
        expected=[f"large IN_USE: it waits for a, b ({IN_USE})"],
    ),
    "idle instances on a hold are destroyed while much is free": Decision(
        nodes=FREE_NODES,
        pods=[LARGE],
        expected=["a: on hold for a waiting pod on GPU 0, without 2x 1g.5gb", ON_A],
    ),
    "reserved devices on a hold stay": Decision(
        nodes=FREE_NODES,
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: on hold for a waiting pod on GPU 0, without 1x 1g.5gb", ON_A],
    ),
    # The small pod's device on node a stays ready, and one node may still change.
    "idle instances become devices for expected pods": Decision(
        nodes=[node("a", ["7g.40gb@0*"], SMALL), node("b", SMALL, SMALL)],
        pods=[],
        limits={"expected": [LARGE, pod("small", "1g.5gb"), pod("larger", "2x7g.40gb")]},
        expected=["b: 1x 7g.40gb instead of 7x 1g.5gb for expected pods"],
    ),
    "expected pods find what they need": Decision(
        nodes=[node("a", ["7g.40gb@0*"], SMALL), node("b", SMALL, SMALL)],
        pods=[],
        limits={"expected": [pod("small", "1g.5gb")]},
        expected=[],
    ),
    "devices are prepared beside a waiting pod while another node may change": Decision(
        nodes=[node("a", SMALL), node("b", SMALL)],
        pods=[pod("p", "1g.5gb")],
        limits={"expected": [LARGE]},
        expected=[
            "b: 1x 7g.40gb instead of 7x 1g.5gb for expected pods",
            f"p SCHEDULER: node a {ROOM}",
        ],
    ),
    "nothing is prepared on the last node that may change while a pod waits": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "1g.5gb")],
        limits={"expected": [LARGE]},
        expected=[f"p SCHEDULER: node a {ROOM}"],
    ),
    "an unmet pod does not keep devices from expected pods": Decision(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "7x7g.40gb")],
        limits={"expected": [LARGE]},
        expected=[
            "a: 1x 7g.40gb instead of 7x 1g.5gb for expected pods",
            unmet("p", "7x 7g.40gb", "a (its GPUs can have at most 1x 7g.40gb)"),
        ],
    ),
    "nothing is prepared where instances are in use": Decision(
        nodes=[node("a", ["1g.5gb@0*"])], pods=[], limits={"expected": [LARGE]}, expected=[]
    ),
    "nothing is prepared in place of reserved devices": Decision(
        nodes=[node("a", SMALL)],
        pods=[],
        limits={"expected": [LARGE], "reserved": TWO_ONES},
        expected=[],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_decision_names_changes_and_why_other_pods_wait(case: Decision) -> None:
    assert lines(decide(case.nodes, case.pods, **case.limits)) == case.expected


def test_no_second_node_is_prepared_while_one_is_being_changed_for_it() -> None:
    nodes = {name: node(name, SMALL) for name in "abc"}
    first = decide(nodes.values(), [], expected=[LARGE])
    change, history = only(first), partitions.remember(nodes.values(), [], first)
    # Its agent may not have noticed.
    assert decide(nodes.values(), [], expected=[LARGE], history=history).changes == ()

    nodes[change.node] = node(change.node, SMALL, labels={well_known.STATE_LABEL: "pending"})
    again: dict[str, Any] = {"history": history, "now": NOW + dt.timedelta(seconds=9)}
    assert decide(nodes.values(), [], expected=[LARGE], **again).changes == ()
    assert len(decide(nodes.values(), [], expected=[LARGE, LARGE], **again).changes) == 1


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
