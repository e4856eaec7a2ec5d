"""Nodes on which the scheduler preempts pods for another one."""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, NOW, decide, node, pod
from tests.unit.partitioning.decision_cases import IN_USE, DecisionCase


def preempting(where: str, *, devices: Sequence[str] = ("3g.20gb",)) -> dict[str, Any]:
    """Return a pod for which the scheduler preempts pods on a node."""
    nominated = pod("p", *devices, spec={"priority": 9})
    nominated["status"]["nominatedNodeName"] = where
    return nominated


def not_counted(nominated: dict[str, Any]) -> dict[str, Any]:
    nominated["metadata"]["labels"] = {well_known.PARTITIONING_LABEL: demand.OFF}
    return nominated


LATER = NOW + dt.timedelta(seconds=400)
STUCK_NODES = [node("a", ["3g.20gb@0"])]
STUCK_PODS = [not_counted(preempting("a")), pod("q", "1g.5gb")]
STUCK_SINCE = partitions.remember(STUCK_NODES, STUCK_PODS, decide(STUCK_NODES, STUCK_PODS))

DECISIONS = {
    "the scheduler preempts pods on the node": DecisionCase(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["7g.40gb@0*"])],
        pods=[preempting("a"), pod("q", "1g.5gb")],
        expected=[
            "p SCHEDULER: the scheduler preempts pods on node a for it",
            f"q CHANGING: it waits for a (the scheduler preempts pods on it); b ({IN_USE})",
        ],
    ),
    "the scheduler preempts pods on the node for a pod that does not count": DecisionCase(
        nodes=STUCK_NODES,
        pods=STUCK_PODS,
        expected=["q CHANGING: it waits for a (the scheduler preempts pods on it)"],
    ),
    "the scheduler does not place the pod that does not count": DecisionCase(
        nodes=STUCK_NODES,
        pods=STUCK_PODS,
        limits={"history": STUCK_SINCE, "now": LATER},
        expected=["a: 1x 1g.5gb for q"],
    ),
    "the scheduler preempts pods on the node for a pod without MIG devices": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[preempting("a", devices=()), pod("q", "1g.5gb")],
        expected=["a: 1x 1g.5gb for q"],
    ),
    "the scheduler preempts pods on another node": DecisionCase(
        nodes=[node("a", ["3g.20gb@0*"]), node("b", ["7g.40gb@0*"])],
        pods=[preempting("b"), pod("q", "1g.5gb")],
        expected=[
            "a: 1x 1g.5gb for q",
            "p SCHEDULER: the scheduler preempts pods on node b for it",
        ],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_a_node_under_preemption_is_left_to_the_scheduler(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected
