"""What a rollout does next, decision by decision."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core.fleet import fleet_nodes, goals, marks, node_amounts, rollout
from mig_manager.core.layout import layout_list, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.records import inventory_codec, run_status
from tests.unit.fleet.rollouts import (
    APPLIED,
    FORMER,
    HOLD,
    LAYOUT,
    NodeState,
    a_status,
    busy_node,
    decide,
    done_node,
    failed_node,
    node,
    requested_node,
    rolling,
    states,
)


def draining_node(name: str) -> fleet_nodes.FleetNode:
    """A node that another rollout drains."""
    pending = run_status.State.PENDING
    status = a_status("third", pending, phase="Drain")
    return node(name, requested="third", state=pending, status=status, taint_keys=HOLD)


RETRYING = a_status(
    "third", run_status.State.FAILED, reason="InUse", retryAt="2026-01-01T00:00:00Z"
)
NO_GPUS: dict[str, Any] = {"requested": None, "applied": "", "state": None, "status": None}


@pytest.mark.parametrize(
    ("nodes", "most", "start"),
    [
        pytest.param([*map(node, "edcba")], "2", ("a", "b"), id="as many as may be unavailable"),
        pytest.param([node("n10"), node("n9")], "1", ("n9",), id="in the order of numbers"),
        pytest.param(
            [node("a"), node("z", is_unschedulable=True)],
            "1",
            ("z",),
            id="first one cordoned by others",
        ),
        pytest.param(
            [node(name, is_unschedulable=True) for name in "abcdef"],
            "2",
            ("a", "b"),
            id="not all that are cordoned by others at once",
        ),
        pytest.param(
            [busy_node("a"), node("z", is_unschedulable=True)],
            "1",
            (),
            id="none cordoned by others beside one in progress",
        ),
        pytest.param(
            [failed_node("a", is_retried=True), node("z", is_unschedulable=True)],
            "1",
            (),
            id="none cordoned by others beside one that is retried",
        ),
        pytest.param([done_node("a"), node("b")], "1", ("b",), id="another after one is applied"),
        pytest.param(
            [draining_node("a"), node("b")], "2", ("b",), id="another than one in a change"
        ),
        pytest.param(
            [
                node("a", requested="third", state=run_status.State.FAILED, status=RETRYING),
                node("b"),
            ],
            "1",
            ("a",),
            id="first one that retries another request",
        ),
        pytest.param([failed_node("a"), node("b")], "1", ("b",), id="another after a failure"),
        pytest.param(
            [node("a", status=None, applied="", state=None, requested=None, gpus="published")],
            "1",
            ("a",),
            id="one with published GPUs and no status",
        ),
        pytest.param(
            [*(node(f"cpu-{i}", **NO_GPUS) for i in range(30)), *map(node, "edcba")],
            "40%",
            ("a", "b"),
            id="a percentage of the nodes with an agent",
        ),
        pytest.param(
            [node("cpu", is_unschedulable=True, **NO_GPUS), node("z")],
            "1",
            ("z",),
            id="whatever nodes without GPUs do",
        ),
    ],
)
def test_a_rollout_starts_the_nodes_that_its_budget_allows(
    nodes: list[fleet_nodes.FleetNode], most: str, start: tuple[str, ...]
) -> None:
    assert decide(*nodes, most=most).start == start


def test_a_failure_before_the_request_does_not_count_as_its_outcome() -> None:
    earlier_run = a_status(
        LAYOUT, run_status.State.FAILED, reason="InUse", startedAt="2026-01-01T00:00:00.5Z"
    )
    before = node(requested=None, state=run_status.State.FAILED, status=earlier_run)
    written = goals.RolloutGoal(layout=LAYOUT).mark(before)
    assert written is not None
    mark = marks.parse(written.to_json())
    requested = dataclasses.replace(
        requested_node(state=run_status.State.FAILED, status=earlier_run), mark=mark
    )

    decision = decide(requested, node("b"))

    assert states(decision) == {"a": NodeState.PENDING, "b": NodeState.TO_DO}
    assert decision.start == ()


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [("3", 300, 3), ("10%", 300, 30), ("10%", 39, 3), ("1%", 5, 1), ("100%", 7, 7)],
)
def test_a_percentage_is_of_the_nodes_selected_and_one_at_least(
    most: str, count: int, expected: int
) -> None:
    assert node_amounts.scale(most, count) == expected


@pytest.mark.parametrize(
    "away",
    [
        {"is_unschedulable": True},
        {"taint_keys": HOLD},
        {"is_ready": False},
        {"state": run_status.State.PENDING},
        {"status": a_status(FORMER, run_status.State.FAILED, retryAt="2026-01-01T00:00:00Z")},
        {"requested": "another"},
    ],
    ids=lambda away: next(iter(away)),
)
def test_a_node_that_is_unavailable_already_or_about_to_be_counts(away: dict[str, Any]) -> None:
    decision = decide(node("a", **away), node("y"), node("z"))

    assert decision.unavailable == ("a",)
    assert "y" not in decision.start


def shown(decision: rollout.RolloutDecision) -> str:
    """Return a decision in words."""
    actions = {
        "start": decision.start,
        "withdraw": decision.withdraw,
        "unavailable": decision.unavailable,
    }
    return "; ".join(
        (
            decision.phase.value,
            ", ".join(f"{each.name} {each.state.value}" for each in decision.nodes),
            *(f"{action} {' '.join(names)}" for action, names in actions.items() if names),
            *(f"{each.name}: {each.message}" for each in decision.failures),
        )
    )


RETRIED = failed_node("a", is_retried=True)
RETRIED_TWICE = failed_node("a", is_retried=True, attempt=2)
STOPPED = requested_node(
    "a",
    state=run_status.State.FAILED,
    status=a_status(LAYOUT, run_status.State.FAILED, reason="Interrupted"),
)
DEAD = node("z", requested="another", status=APPLIED)
OTHER = node("z", requested="third", status=APPLIED)
WAITING = busy_node("a", phase="Wait")


def recreated_node(name: str) -> fleet_nodes.FleetNode:
    """A node registered again under its name."""
    fleet_node = node(name, requested=None, applied="", state=None, status=None, gpus="published")
    return dataclasses.replace(fleet_node, view=dataclasses.replace(fleet_node.view, uid="new"))


DOCUMENT = layout_parser.parse(
    "version: v1\nmig-configs: {new: [{devices: all, mig-enabled: false}]}", source="layouts.yaml"
)
HASH = DOCUMENT.layout(LAYOUT).content_hash
EDITED = a_status(LAYOUT, run_status.State.SUCCESS, configHash="edited")


def listing_node(fleet_node: fleet_nodes.FleetNode, content_hash: str) -> fleet_nodes.FleetNode:
    """The node with this content of the layout in its agent's list."""
    entry = layout_list.Entry(name=LAYOUT, content_hash=content_hash, origin="layouts.yaml:1")
    annotations = {well_known.LAYOUTS_ANNOTATION: layout_list.to_json([entry])}
    view = dataclasses.replace(fleet_node.view, annotations=annotations)
    return dataclasses.replace(fleet_node, view=view)


REPLACED = requested_node("a", mark=marks.Mark(layout="earlier", before=FORMER))
NOT_READY = node("b", is_ready=False)


class Step(NamedTuple):
    """A moment of a rollout: its nodes then, and what is decided about them."""

    now_s: float
    nodes: list[fleet_nodes.FleetNode]
    expected: str


class Course(NamedTuple):
    """A rollout, step by step."""

    steps: list[Step]
    options: Mapping[str, Any] = MappingProxyType({})  # of ``rolling``
    is_carried_out: bool = False  # whether labels are written as decided


AWAITED = "rolling; a pending; unavailable a"
COURSES = {
    "all nodes have the layout": Course(
        steps=[
            Step(
                0,
                [requested_node("a"), done_node("b")],
                "rolling; a pending, b success; unavailable a",
            ),
            Step(1, [done_node("a"), done_node("b")], "done; a success, b success"),
        ]
    ),
    "a requested node counts before its label shows it": Course(
        is_carried_out=True,
        steps=[
            Step(0, [node("a"), node("b")], "rolling; a to-do, b to-do; start a"),
            Step(1, [node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
        ],
    ),
    "a rollout whose nodes are all removed fails": Course(
        steps=[
            Step(0, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(1, [], "failed; "),
        ]
    ),
    "a node that is removed no longer counts": Course(
        steps=[
            Step(0, [done_node("a"), node("b")], "rolling; a success, b to-do; start b"),
            Step(1, [done_node("a")], "done; a success"),
        ]
    ),
    "a node that is not ready is skipped": Course(
        options={"most": "5"},
        steps=[Step(0, [node("a", is_ready=False)], "failed; a skipped; unavailable a")],
    ),
    "a node with another manager is skipped": Course(
        steps=[
            Step(
                0,
                [node("a", status=None, applied=""), node("b")],
                "rolling; a skipped, b to-do; start b",
            )
        ]
    ),
    "a failure pauses the others once nodes in progress have ended": Course(
        options={"most": "2", "pauses": True},
        steps=[
            Step(
                0,
                [busy_node("a"), busy_node("b"), node("c")],
                "rolling; a pending, b pending, c to-do; unavailable a b",
            ),
            Step(
                1,
                [failed_node("a"), busy_node("b"), node("c")],
                "pausing; a failed, b pending, c to-do; unavailable b; a: in use",
            ),
            Step(
                2,
                [failed_node("a"), done_node("b"), node("c")],
                "paused; a failed, b success, c to-do; a: in use",
            ),
        ],
    ),
    "a pause stays while the agent retries": Course(
        options={"pauses": True},
        steps=[
            Step(0, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(1, [RETRIED, node("b")], "paused; a failed, b to-do; unavailable a; a: in use"),
            Step(
                2,
                [busy_node("a"), node("b")],
                "paused; a pending, b to-do; unavailable a; a: in use",
            ),
        ],
    ),
    "an agent that stopped during its run is awaited": Course(
        options={"pauses": True},
        steps=[
            Step(0, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(50, [STOPPED, done_node("b")], "rolling; a pending, b success; unavailable a"),
            Step(
                101,
                [STOPPED, done_node("b")],
                "failed; a timed-out, b success; unavailable a; "
                "a: not applied 100 s after the start",
            ),
        ],
    ),
    "earlier failures pause nothing": Course(
        options={"pauses": True},
        steps=[
            Step(
                0, [failed_node("a"), node("b")], "rolling; a failed, b to-do; start b; a: in use"
            )
        ],
    ),
    "an earlier failure that a retry repeats pauses the others": Course(
        options={"pauses": True},
        steps=[
            Step(0, [RETRIED, node("b")], "rolling; a failed, b to-do; unavailable a; a: in use"),
            Step(1, [RETRIED, node("b")], "rolling; a failed, b to-do; unavailable a; a: in use"),
            Step(
                2,
                [RETRIED_TWICE, node("b")],
                "paused; a failed, b to-do; unavailable a; a: in use",
            ),
        ],
    ),
    "a failure of the last node ends the rollout": Course(
        options={"pauses": True},
        steps=[
            Step(
                0, [done_node("a"), busy_node("b")], "rolling; a success, b pending; unavailable b"
            ),
            Step(1, [done_node("a"), failed_node("b")], "failed; a success, b failed; b: in use"),
        ],
    ),
    "a retrying node is awaited until its time-out": Course(
        steps=[
            Step(0, [busy_node("a")], "rolling; a pending; unavailable a"),
            Step(1, [RETRIED, node("b")], "rolling; a failed, b to-do; unavailable a; a: in use"),
            Step(101, [RETRIED], "failed; a failed; unavailable a; a: in use"),
        ]
    ),
    "a request without response is withdrawn and makes room": Course(
        is_carried_out=True,
        steps=[
            Step(
                0, [requested_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"
            ),
            Step(
                9, [requested_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"
            ),
            Step(
                10,
                [requested_node("a"), node("b")],
                "rolling; a no-response, b to-do; withdraw a; unavailable a; "
                "a: no agent has responded for 10 s; is it running?",
            ),
            Step(
                11,
                [node("a"), node("b")],
                "rolling; a no-response, b to-do; start b; "
                "a: no agent responded; the previous request is restored",
            ),
        ],
    ),
    "a label without a rollout's mark is not withdrawn": Course(
        steps=[
            Step(0, [requested_node("a", mark=None)], "rolling; a pending; unavailable a"),
            Step(
                10,
                [requested_node("a", mark=None)],
                "failed; a no-response; a: no agent has responded for 10 s; is it running?",
            ),
        ]
    ),
    "a label that replaced one of an earlier rollout is not withdrawn": Course(
        steps=[
            Step(0, [REPLACED], "rolling; a pending; unavailable a"),
            Step(
                10,
                [REPLACED],
                "failed; a no-response; a: no agent has responded for 10 s; is it running?",
            ),
        ]
    ),
    "a dead agent with an old request is not unavailable for ever": Course(
        steps=[
            Step(0, [node("b"), DEAD], "rolling; b to-do, z to-do; unavailable z"),
            Step(10, [node("b"), DEAD], "rolling; b to-do, z to-do; start b"),
        ]
    ),
    "another request restarts the silence of an agent": Course(
        steps=[
            Step(0, [node("b"), DEAD], "rolling; b to-do, z to-do; unavailable z"),
            Step(9, [node("b"), OTHER], "rolling; b to-do, z to-do; unavailable z"),
            Step(18, [node("b"), OTHER], "rolling; b to-do, z to-do; unavailable z"),
            Step(19, [node("b"), OTHER], "rolling; b to-do, z to-do; start b"),
        ]
    ),
    "a node starts after another rollout's change": Course(
        steps=[
            Step(0, [draining_node("a"), node("b")], "rolling; a to-do, b to-do; unavailable a"),
            Step(99, [draining_node("a"), node("b")], "rolling; a to-do, b to-do; unavailable a"),
            Step(100, [node("a"), node("b")], "rolling; a to-do, b to-do; start a"),
        ]
    ),
    "a change of another rollout that does not end stalls": Course(
        steps=[
            Step(50, [draining_node("a"), node("b")], "rolling; a to-do, b to-do; unavailable a"),
            Step(150, [draining_node("a"), node("b")], "rolling; a to-do, b to-do; unavailable a"),
            Step(160, [draining_node("a"), node("b")], "stalled; a to-do, b to-do; unavailable a"),
        ]
    ),
    "a node registered again starts again": Course(
        options={"pauses": True},
        steps=[
            Step(0, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(1, [recreated_node("a"), node("b")], "rolling; a to-do, b to-do; start a"),
        ],
    ),
    "a failure pauses the others also once its node is registered again": Course(
        options={"most": "2", "pauses": True},
        steps=[
            Step(
                0,
                [busy_node("a"), busy_node("b"), node("c")],
                "rolling; a pending, b pending, c to-do; unavailable a b",
            ),
            Step(
                1,
                [failed_node("a"), busy_node("b"), node("c")],
                "pausing; a failed, b pending, c to-do; unavailable b; a: in use",
            ),
            Step(
                2,
                [recreated_node("a"), busy_node("b"), node("c")],
                "pausing; a to-do, b pending, c to-do; unavailable b",
            ),
            Step(
                3,
                [recreated_node("a"), done_node("b"), node("c")],
                "paused; a to-do, b success, c to-do",
            ),
        ],
    ),
    "a node times out, but not while it waits for a slot": Course(
        steps=[
            Step(0, [WAITING, node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(500, [WAITING, node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(599, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(
                600,
                [busy_node("a"), node("b")],
                "rolling; a timed-out, b to-do; unavailable a; "
                "a: not applied 100 s after the start",
            ),
        ]
    ),
    "a rollout that can neither start nor await a node stalls": Course(
        steps=[
            Step(0, [node("a"), NOT_READY], "rolling; a to-do, b skipped; unavailable b"),
            Step(9, [node("a"), NOT_READY], "rolling; a to-do, b skipped; unavailable b"),
            Step(10, [node("a"), NOT_READY], "stalled; a to-do, b skipped; unavailable b"),
        ]
    ),
    "a superseded node is left alone and a deleted one forgotten": Course(
        steps=[
            Step(0, [busy_node("a")], "rolling; a pending; unavailable a"),
            Step(
                1,
                [node("a", requested="third")],
                "failed; a superseded; unavailable a; a: layout third was requested meanwhile",
            ),
            Step(
                1.5,
                [node("a", requested=None)],
                "failed; a superseded; a: the label was removed meanwhile",
            ),
            Step(2, [done_node("b")], "done; b success"),
        ]
    ),
    "a node whose agent is about to have the content is awaited": Course(
        options={"document": DOCUMENT},
        steps=[
            Step(0, [listing_node(done_node(status=EDITED), "old")], AWAITED),
            Step(1, [listing_node(done_node(status=EDITED), HASH)], AWAITED),
            Step(2, [listing_node(busy_node(), HASH)], "rolling; a pending; unavailable a"),
            Step(3, [listing_node(done_node(), HASH)], "done; a success"),
        ],
    ),
    "a node whose agent no longer has the content is superseded": Course(
        options={"document": DOCUMENT},
        steps=[
            Step(0, [listing_node(busy_node(), HASH)], "rolling; a pending; unavailable a"),
            Step(
                1,
                [listing_node(busy_node(), "edited"), listing_node(node("b"), "edited")],
                "rolling; a superseded, b to-do; unavailable a; "
                "a: the layout's content was edited meanwhile",
            ),
            Step(
                11,
                [
                    listing_node(done_node(status=EDITED), "edited"),
                    listing_node(node("b"), "edited"),
                ],
                "stalled; a superseded, b to-do; a: the layout's content was edited meanwhile",
            ),
        ],
    ),
    "the agent of a superseded node has the whole time for its response": Course(
        is_carried_out=True,
        steps=[
            Step(
                0,
                [node("a", requested="second"), node("b")],
                "rolling; a to-do, b to-do; unavailable a",
            ),
            Step(1, [busy_node("a"), node("b")], "rolling; a pending, b to-do; unavailable a"),
            Step(
                11,
                [node("a", requested="third"), node("b")],
                "rolling; a superseded, b to-do; unavailable a; "
                "a: layout third was requested meanwhile",
            ),
        ],
    ),
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_a_rollout_takes_its_course_step_by_step(course: Course) -> None:
    rolled = rolling(**course.options)
    for now_s, nodes, expected in course.steps:
        decision = rolled.decide(nodes, now_s)
        assert shown(decision) == expected, now_s
        for name in decision.start if course.is_carried_out else ():
            rolled.record_request(name)
        for name in decision.withdraw if course.is_carried_out else ():
            rolled.record_withdrawal(name)


def test_rules_with_uuids_are_compared_with_a_nodes_published_gpus() -> None:
    product = hardware.find("A100-SXM4-40GB")
    of_a, of_b = (
        inventory_codec.to_json([dataclasses.replace(hardware.template(product, 0), uuid=uuid)])
        for uuid in ("GPU-" + digit * 8 + "-1111-2222-3333-444444444444" for digit in "ab")
    )
    rule = "{devices: [GPU-aaaaaaaa-1111-2222-3333-444444444444], mig-enabled: false}"
    text = f"version: v1\nmig-configs:\n  {LAYOUT}: [{rule}]"
    document = layout_parser.parse(text, source="a file")
    goal = goals.RolloutGoal(layout=LAYOUT, document=document)
    rolled = rollout.Rollout(goal, goals.RolloutLimits(max_unavailable="2"))

    first = rolled.decide([node("a", gpus=of_b), node("b", gpus=of_a)], 0.0)
    # For a moment no GPU of the node can be observed.
    meanwhile = rolled.decide([node("a"), node("b", gpus=of_a)], 0.5)
    later = rolled.decide([node("a", gpus=of_a), node("b", gpus=of_a)], 1.0)

    for decision in (first, meanwhile):
        assert states(decision) == {"a": NodeState.SKIPPED, "b": NodeState.TO_DO}
    assert later.start == ("a", "b")
