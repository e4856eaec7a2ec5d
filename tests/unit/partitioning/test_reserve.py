"""Reserved devices stay, and may move to another GPU."""

import pytest

from tests.rigs.cluster.partitions import EMPTY, SMALL, node, pod
from tests.rigs.node import samples
from tests.unit.partitioning.decision_cases import LARGE, TWO_ONES, DecisionCase, unmet

SIX_ONES = [f"1g.5gb@{start}" for start in range(6)]

DECISIONS = {
    "reserved devices stay": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("p", "4g.20gb")],
        limits={"reserved": TWO_ONES},
        expected=["a: 1x 4g.20gb instead of 4x 1g.5gb for p"],
    ),
    "no pod takes the slices of reserved devices": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=[unmet("large", "1x 7g.40gb", "a (the reserve leaves too little of its GPUs)")],
    ),
    "pods may use the reserved devices, and others have to stay": DecisionCase(
        nodes=[node("a", ["3g.20gb@0", "1g.5gb@4", "1g.5gb@5"])],
        pods=[pod("p", "2x3g.20gb")],
        limits={"reserved": {**TWO_ONES, samples.profile("3g.20gb"): 1}},
        expected=[unmet("p", "2x 3g.20gb", "a (the reserve leaves too little of its GPUs)")],
    ),
    "reserved devices move to another GPU": DecisionCase(
        nodes=[node("a", ["1g.5gb@0"], ["1g.5gb@0"])],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: 2x 1g.5gb, 1x 7g.40gb instead of 1x 1g.5gb for large"],
    ),
    "many reserved devices move to other GPUs": DecisionCase(
        nodes=[node("a", *[SIX_ONES] * 16)],
        pods=[LARGE],
        limits={"reserved": {samples.profile("1g.5gb"): 96}},
        expected=["a: 15x 1g.5gb, 1x 7g.40gb instead of 6x 1g.5gb for large"],
    ),
    "no GPU is on hold for a pod that the reserve keeps off": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[pod("large", "7g.40gb", age_s=700), pod("s", "3g.20gb", age_s=5)],
        limits={"reserved": TWO_ONES},
        expected=[
            "a: 1x 3g.20gb instead of 3x 1g.5gb for s",
            unmet("large", "1x 7g.40gb", "a (the reserve leaves too little of its GPUs)"),
        ],
    ),
    "reserved devices are not created": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[LARGE],
        limits={"reserved": TWO_ONES},
        expected=["a: 1x 7g.40gb for large"],
    ),
    "a reserved device moves out of the way": DecisionCase(
        nodes=[node("a", ["1g.5gb@0"])],
        pods=[pod("p", "4g.20gb")],
        limits={"reserved": {samples.profile("1g.5gb"): 1}},
        expected=["a: 1x 1g.5gb, 1x 4g.20gb instead of 1x 1g.5gb for p"],
    ),
    "nothing is prepared in place of reserved devices": DecisionCase(
        nodes=[node("a", SMALL)],
        pods=[],
        limits={"expected": [LARGE], "reserved": TWO_ONES},
        expected=[],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_keeps_the_reserve(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected
