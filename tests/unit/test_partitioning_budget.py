"""Which nodes count against the budget of nodes under change."""

import datetime as dt
import json
from typing import Any

import pytest

from mig_manager.core.node import well_known
from mig_manager.core.partitioning import changes, demand, partitioned, waiting
from tests.unit.partitions import EMPTY, NOW, decided, node, pod, seen, why

Wait = waiting.WaitReason
LATER = NOW + dt.timedelta(seconds=400)


def test_no_more_nodes_change_than_the_budget_allows() -> None:
    nodes = [node(name, EMPTY) for name in "abc"]
    pods = [pod(f"p{n}", "7g.40gb", age_s=90 - n) for n in range(3)]
    decision = decided(nodes, pods, max_unavailable="67%")
    assert [change.node for change in decision.changes] == ["a", "b"]
    assert why(decision)[0] is Wait.LIMITED
    changing = node(
        "a", EMPTY, labels={well_known.STATE_LABEL: "pending", well_known.CONFIG_LABEL: "x"}
    )
    decision = decided([changing, *nodes[1:]], pods, max_unavailable="1")
    assert not decision.changes


def test_an_agent_that_is_silent_for_long_does_not_use_up_the_budget() -> None:
    silent = node("a", EMPTY, labels={well_known.CONFIG_LABEL: "x"})
    written: dict[str, Any] = {"f:metadata": {"f:labels": {f"f:{well_known.CONFIG_LABEL}": {}}}}
    silent["metadata"]["managedFields"] = [
        {"manager": "kubectl", "time": NOW.isoformat(), "fieldsV1": written}
    ]
    nodes, pods = [silent, node("b", EMPTY)], [pod("p", "1g.5gb")]
    assert not decided(nodes, pods, max_unavailable="1").changes
    decision = decided(nodes, pods, max_unavailable="1", now=LATER)
    assert [change.node for change in decision.changes] == ["b"]


def test_a_node_whose_agent_will_retry_is_left_alone_and_uses_no_budget() -> None:
    report = {"config": "x", "state": "failed", "retryAt": NOW.isoformat()}
    retried = node(
        "a",
        EMPTY,
        labels={well_known.CONFIG_LABEL: "x", well_known.STATE_LABEL: "failed"},
        annotations={well_known.STATUS_ANNOTATION: json.dumps(report)},
    )
    decision = decided([retried], [pod("p", "1g.5gb")])
    assert why(decision) == (Wait.UNUSABLE, "it waits for a (its agent retries layout x)")
    both = decided([retried, node("b", EMPTY)], [pod("p", "1g.5gb")], max_unavailable="1")
    assert [change.node for change in both.changes] == ["b"]


def test_agent_that_died_in_a_run_does_not_block_other_nodes() -> None:
    def served(age_s: float) -> bool:
        began = (NOW - dt.timedelta(seconds=age_s)).isoformat()
        report = {"config": "custom", "state": "pending", "startedAt": began}
        working = node(
            "a",
            EMPTY,
            labels={well_known.CONFIG_LABEL: "custom", well_known.STATE_LABEL: "pending"},
            annotations={well_known.STATUS_ANNOTATION: json.dumps(report)},
        )
        pods = [pod("p", "7g.40gb")]
        return bool(decided([working, node("b", EMPTY)], pods, max_unavailable="1").changes)

    assert [served(age_s) for age_s in (10, 3500, 4000)] == [False, False, True]


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
    report = {"config": "custom", "state": state, "startedAt": NOW.isoformat()}
    own_clock = partitioned.OwnClock()

    def counts(after_s: int) -> bool:
        (changing,), _ = seen(
            [
                node(
                    "a",
                    EMPTY,
                    labels={well_known.CONFIG_LABEL: "custom", well_known.STATE_LABEL: state},
                    annotations={well_known.STATUS_ANNOTATION: json.dumps(report)},
                    is_ready=after_s in ready_after_s,
                )
            ],
            (),
        )
        now = NOW + dt.timedelta(seconds=after_s)
        (dated,) = own_clock.with_own_times([changing], now=now)
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
    changing = partitioned.parse(
        node(
            "a",
            EMPTY,
            labels={well_known.CONFIG_LABEL: "custom", well_known.STATE_LABEL: "pending"},
            annotations={
                well_known.STATUS_ANNOTATION: json.dumps(
                    {"config": "custom", "state": "pending", "startedAt": NOW.isoformat()}
                )
            },
        )
    )
    assert changing
    requests, own_clock = (
        partitioned.Requests([agent("first", is_ready=True)]),
        partitioned.OwnClock(),
    )
    requests.replace(agent("first", is_ready=True), None)
    if is_ready_again is not None:
        requests.replace(None, agent("second", is_ready=is_ready_again))

    def counts(after_s: int) -> bool:
        now = NOW + dt.timedelta(seconds=after_s)
        (dated,) = own_clock.with_own_times(partitioned.with_pods([changing], requests), now=now)
        return changes.is_under_change(dated, now=now)

    counts(0)
    assert [counts(after_s) for after_s in (290, 310)] == expected


def agent(name: str, *, is_ready: bool) -> demand.BoundPod:
    item = pod(name, node="a", metadata={"labels": {"app.kubernetes.io/name": "mig-manager"}})
    item["status"]["conditions"] = [{"type": "Ready", "status": str(is_ready)}]
    parsed = demand.parse(item)
    assert isinstance(parsed, demand.BoundPod)
    return parsed
