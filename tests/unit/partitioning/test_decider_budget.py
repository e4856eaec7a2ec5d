"""Which nodes count against the budget of nodes under change."""

import datetime as dt

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import changes
from mig_manager.core.partitioning.nodes import node_requests, own_clock, partitioned_nodes
from mig_manager.core.records import run_status
from tests.rigs import api_objects
from tests.rigs.cluster.partitions import EMPTY, NOW, node, parse_cluster, pod
from tests.unit.partitioning.decision_cases import OTHERS, DecisionCase

FULL = "as many nodes as allowed are under change"
WORKS = "works on layout custom"
A, B = (f"{name}: 1x 7g.40gb for p0" for name in "ab")


def working(
    state: str = "pending", *, age_s: float = 0.0, is_ready: bool = True
) -> api_objects.Object:
    """Return a node whose agent began to work on a layout some time ago."""
    began = (NOW - dt.timedelta(seconds=age_s)).isoformat()
    text = api_objects.a_status("custom", run_status.State(state), startedAt=began)
    return node(
        "a",
        EMPTY,
        labels={well_known.CONFIG_LABEL: "custom", well_known.STATE_LABEL: state},
        annotations=api_objects.annotations_of_agent(status_text=text),
        is_ready=is_ready,
    )


def requested_of_a_silent_agent() -> api_objects.Object:
    item = node("a", EMPTY, labels={well_known.CONFIG_LABEL: "x"})
    written: api_objects.Object = {
        "f:metadata": {"f:labels": {f"f:{well_known.CONFIG_LABEL}": {}}}
    }
    request = {"manager": "kubectl", "time": NOW.isoformat(), "fieldsV1": written}
    return {**item, "metadata": {**item["metadata"], "managedFields": [request]}}


def limited_line(cause: str) -> str:
    return f"p0 LIMITED: it waits for b ({FULL}); a (its agent {cause})"


EVERY = [node(name, EMPTY) for name in "abc"]
OTHER = node("b", EMPTY)
SILENT = requested_of_a_silent_agent()
RETRIED = node(
    "a",
    EMPTY,
    labels={well_known.CONFIG_LABEL: "x", well_known.STATE_LABEL: "failed"},
    annotations=api_objects.annotations_of_agent(
        status_text=api_objects.a_status("x", run_status.State.FAILED, retryAt=NOW.isoformat())
    ),
)
PODS = [pod(f"p{number}", "7g.40gb", age_s=90 - number) for number in range(3)]


def of_one(
    nodes: list[api_objects.Object], expected: str, *, now: dt.datetime = NOW
) -> DecisionCase:
    """Return what is decided with one pod and a budget of one node."""
    limits = {"max_unavailable": "1", "now": now}
    return DecisionCase(nodes=nodes, pods=PODS[:1], limits=limits, expected=[expected])


DECISIONS = {
    "as many nodes as the budget allows": DecisionCase(
        nodes=EVERY,
        pods=PODS,
        limits={"max_unavailable": "67%"},
        expected=[
            A,
            B.replace("p0", "p1"),
            f"p2 LIMITED: it waits for c ({FULL}); a, b ({OTHERS})",
        ],
    ),
    "nodes for expected pods are in the budget": DecisionCase(
        nodes=EVERY,
        pods=[],
        limits={"max_unavailable": "1", "expected": PODS},
        expected=[A.replace("p0", "expected pods")],
    ),
    "a node under change is in the budget": of_one([working(), OTHER], limited_line(WORKS)),
    "a run may take an hour": of_one([working(age_s=3500), OTHER], limited_line(WORKS)),
    "an agent that died in a run is not in the budget": of_one([working(age_s=4000), OTHER], B),
    "the agent was just asked": of_one(
        [SILENT, OTHER], limited_line("has not reported on layout x")
    ),
    "an agent that is silent for long is not in the budget": of_one(
        [SILENT, OTHER], B, now=NOW + dt.timedelta(seconds=400)
    ),
    "a node whose agent will retry is not changed": of_one(
        [RETRIED], "p0 UNUSABLE: it waits for a (its agent retries layout x)"
    ),
    "a node whose agent will retry is not in the budget": of_one([RETRIED, OTHER], B),
}


@pytest.mark.parametrize("case", DECISIONS.values(), ids=DECISIONS)
def test_nodes_under_change_count_against_the_budget(case: DecisionCase) -> None:
    assert case.decision_lines() == case.expected


@pytest.mark.parametrize(
    ("state", "ready_after_s", "expected"),
    [
        ("pending", (), [True, True, False, False]),
        ("pending", (200,), [True, True, True, True, False]),
        ("rebooting", (), [True, True, True, False]),
    ],
)
def test_a_node_that_is_lost_in_a_run_does_not_use_up_the_budget(
    state: str, ready_after_s: tuple[int, ...], expected: list[bool]
) -> None:
    clock = own_clock.OwnClock()

    def counts(after_s: int) -> bool:
        (changing,), _ = parse_cluster([working(state, is_ready=after_s in ready_after_s)], ())
        now = NOW + dt.timedelta(seconds=after_s)
        (dated,) = clock.with_own_times([changing], node_requests.Requests(), now=now)
        return changes.is_under_change(dated, now=now)

    at_s = (0, *ready_after_s, 290, 310, 3700)
    assert [counts(after_s) for after_s in at_s] == expected


@pytest.mark.parametrize(
    ("is_ready_again", "expected"),
    [(None, [True, False]), (False, [True, False]), (True, [True, True])],
)
def test_an_agent_that_is_lost_in_a_run_does_not_use_up_the_budget(
    *, is_ready_again: bool | None, expected: list[bool]
) -> None:
    """Its node is ready; ``is_ready_again``: of the agent's pod that follows, if one does."""
    changing = partitioned_nodes.parse(working())
    assert changing
    clock = own_clock.OwnClock()
    requests = node_requests.Requests([agent("first", is_ready=True)])
    requests.replace(agent("first", is_ready=True), None)
    if is_ready_again is not None:
        requests.replace(None, agent("second", is_ready=is_ready_again))

    def counts(after_s: int) -> bool:
        now = NOW + dt.timedelta(seconds=after_s)
        (dated,) = clock.with_own_times([changing], requests, now=now)
        return changes.is_under_change(dated, now=now)

    counts(0)
    assert [counts(after_s) for after_s in (290, 310)] == expected


def agent(name: str, *, is_ready: bool) -> demand.BoundPod:
    item = pod(name, node_name="a", metadata={"labels": {"app.kubernetes.io/name": "mig-manager"}})
    item["status"]["conditions"] = [{"type": "Ready", "status": str(is_ready)}]
    parsed = demand.parse(item)
    assert isinstance(parsed, demand.BoundPod)
    return parsed
