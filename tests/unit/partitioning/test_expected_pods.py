"""Devices for pods that are expected, before they come."""

import datetime as dt
from typing import Any

import pytest

from mig_manager.core.objects import well_known
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import NOW, SMALL, decide, node, only, pod
from tests.unit.partitioning.decision_cases import LARGE, ROOM, DecisionCase, unmet

DECISIONS = {
    # The small pod's device on node a stays ready, and one node may still change.
    "idle instances become devices for expected pods": DecisionCase(
        nodes=[node("a", ["7g.40gb@0*"], SMALL), node("b", SMALL, SMALL)],
        pods=[],
        limits={"expected": [LARGE, pod("small", "1g.5gb"), pod("larger", "2x7g.40gb")]},
        expected=["b: 1x 7g.40gb instead of 7x 1g.5gb for expected pods"],
    ),
    "expected pods find what they need": DecisionCase(
        nodes=[node("a", ["7g.40gb@0*"], SMALL), node("b", SMALL, SMALL)],
        pods=[],
        limits={"expected": [pod("small", "1g.5gb")]},
        expected=[],
    ),
    "devices are prepared beside a waiting pod while another node may change": DecisionCase(
        nodes=[node("a", SMALL), node("b", SMALL)],
        pods=[pod("p", "1g.5gb")],
        limits={"expected": [LARGE]},
        expected=[
            "b: 1x 7g.40gb instead of 7x 1g.5gb for expected pods",
            f"p SCHEDULER: node a {ROOM}",
        ],
    ),
    "nothing is prepared on the last node that may change while a pod waits": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "1g.5gb")],
        limits={"expected": [LARGE]},
        expected=[f"p SCHEDULER: node a {ROOM}"],
    ),
    "an unmet pod does not keep devices from expected pods": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "7x7g.40gb")],
        limits={"expected": [LARGE]},
        expected=[
            "a: 1x 7g.40gb instead of 7x 1g.5gb for expected pods",
            unmet("p", "7x 7g.40gb", "a (its GPUs can have at most 1x 7g.40gb)"),
        ],
    ),
    "nothing is prepared where instances are in use": DecisionCase(
        nodes=[node("a", ["1g.5gb@0*"])], pods=[], limits={"expected": [LARGE]}, expected=[]
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_devices_are_prepared_for_expected_pods(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected


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
