"""Pods whose request no node can serve, and why."""

import pytest

from tests.rigs.cluster.partitions import EMPTY, node, pod
from tests.unit.partitioning.decision_cases import DecisionCase, unmet

CORDONED = "b (the node is cordoned)"

DECISIONS = {
    "what no node can have is unmet": DecisionCase(
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
    "too little cpu now": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[
            pod("p", "1g.5gb", requests={"cpu": "60"}),
            pod("q", node_name="a", requests={"cpu": "8"}),
        ],
        expected=["p IN_USE: it waits for a (too little cpu is available)"],
    ),
    "too little cpu ever": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb", requests={"cpu": "65"})],
        expected=[
            unmet("p", "1x 1g.5gb", "a (too little cpu)"),
        ],
    ),
    "a misspelt profile is unmet": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", requests={"nvidia.com/mig-tiny": "1"}, age_s=700), pod("q", "7g.40gb")],
        expected=[
            "a: 1x 7g.40gb for q",
            "p unmet: no MIG profile is called nvidia.com/mig-tiny",
        ],
    ),
    "an absurd number of devices costs nothing": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", f"{2**62}x1g.5gb"), pod("q", "7g.40gb")],
        expected=[
            "a: 1x 7g.40gb for q",
            unmet("p", f"{2**62}x 1g.5gb", "a (its GPUs can have at most 7x 1g.5gb)"),
        ],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_says_what_a_pod_lacks(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected
