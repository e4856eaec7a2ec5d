"""How long a node rests after a change."""

import datetime as dt
from typing import Any

import pytest

from mig_manager.core.partitioning.decision import situations
from tests.rigs import api_objects
from tests.rigs.cluster.partitions import EMPTY, NOW, node, pod
from tests.unit.partitioning.decision_cases import DecisionCase

CHANGED = situations.History(
    requests={"a": situations.LayoutRequest(at=NOW - dt.timedelta(seconds=59), content_hash="")}
)


def took(seconds: float) -> list[dict[str, Any]]:
    """Return a node whose last change took some time."""
    began = NOW - dt.timedelta(seconds=seconds)
    status = api_objects.a_status(startedAt=began.isoformat(), finishedAt=NOW.isoformat())
    return [node("a", EMPTY, annotations=api_objects.annotations_of_agent(status_text=status))]


DECISIONS = {
    "a node rests after a change": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED, "cooldown_s": 60.0},
        expected=["p CHANGING: it waits for a (it rests after a change for 1 s more)"],
    ),
    "a node has rested": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED, "cooldown_s": 60.0, "now": NOW + dt.timedelta(seconds=2)},
        expected=["a: 1x 1g.5gb for p"],
    ),
    "a node rests no longer than it must": DecisionCase(
        nodes=[node("a", EMPTY)],
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["a: 1x 1g.5gb for p"],
    ),
    "a node rests as long as its change took": DecisionCase(
        nodes=took(20),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 20 s more)"],
    ),
    "a node rests at most a minute": DecisionCase(
        nodes=took(900),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 60 s more)"],
    ),
    "a node rests some seconds after a quick change": DecisionCase(
        nodes=took(0),
        pods=[pod("p", "1g.5gb")],
        limits={"history": CHANGED},
        expected=["p CHANGING: it waits for a (it rests after a change for 5 s more)"],
    ),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_a_node_rests_after_a_change(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected
