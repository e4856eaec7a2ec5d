"""The undo of a rollout, and the marks on nodes that it goes by."""

import dataclasses
import datetime as dt

import pytest

from mig_manager.core.fleet import fleet_nodes, goals, marks, rollout
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.unit.fleet.rollouts import (
    FORMER,
    HOLD,
    LAYOUT,
    NodeState,
    Phase,
    a_status,
    done_node,
    node,
    states,
)

UNDONE = marks.Mark(layout=LAYOUT, before=FORMER, is_undone=True)


def undoing() -> rollout.Rollout:
    return rollout.Rollout(goals.RolloutGoal(layout=None), goals.RolloutLimits())


def undo(*nodes: fleet_nodes.FleetNode) -> rollout.RolloutDecision:
    return undoing().decide(nodes, 0.0)


def test_undo_includes_the_nodes_with_a_rollouts_mark() -> None:
    assert states(undo(done_node("a"), node("b"))) == {"a": NodeState.TO_DO}
    assert goals.RolloutGoal(layout=None).target(done_node("a")) == FORMER
    assert goals.RolloutGoal(layout=None).mark(done_node("a")) == UNDONE


def test_an_interrupted_undo_continues() -> None:
    decision = undo(node("a", mark=UNDONE), done_node("b"))
    assert states(decision) == {"a": NodeState.SUCCESS, "b": NodeState.TO_DO}
    assert decision.start == ("b",)


def test_undo_of_a_node_that_had_no_label_removes_it() -> None:
    mark = marks.Mark(layout=LAYOUT, before=None)
    unlabelled = node("a", requested=None, mark=dataclasses.replace(mark, is_undone=True))
    assert goals.RolloutGoal(layout=None).target(done_node("a", mark=mark)) is None
    assert undo(unlabelled).phase is Phase.DONE
    tainted = dataclasses.replace(unlabelled.view, taint_keys=HOLD)
    pending = {**unlabelled.view.labels, well_known.STATE_LABEL: run_status.State.PENDING.value}
    for view in (tainted, dataclasses.replace(unlabelled.view, labels=pending)):
        assert undo(dataclasses.replace(unlabelled, view=view)).phase is Phase.ROLLING


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param(node("b"), ("a",), id="at rest"),
        pytest.param(node("b", is_ready=False), (), id="not ready"),
        pytest.param(
            node("b", requested="third", state=run_status.State.PENDING),
            (),
            id="under another change",
        ),
    ],
)
def test_undo_counts_selected_nodes_that_it_does_not_change(
    other: fleet_nodes.FleetNode, expected: tuple[str, ...]
) -> None:
    decision = undo(done_node("a"), other)

    assert decision.start == expected
    assert decision.unavailable == (() if expected else ("b",))
    assert states(decision) == {"a": NodeState.TO_DO}


def test_undo_waits_for_another_change_of_a_selected_node() -> None:
    undone, other = undoing(), node("b", requested="third", state=run_status.State.PENDING)
    times_s = (0.0, 1799.0, 1800.0, 1921.0)
    phases = [undone.decide([done_node("a"), other], now_s).phase for now_s in times_s]

    assert phases == [Phase.ROLLING, Phase.ROLLING, Phase.ROLLING, Phase.STALLED]
    assert undone.decide([done_node("a"), node("b")], 1922.0).start == ("a",)


def test_percentage_of_an_undo_is_of_the_selected_nodes() -> None:
    undone = rollout.Rollout(
        goals.RolloutGoal(layout=None), goals.RolloutLimits(max_unavailable="50%")
    )

    assert undone.decide([*map(done_node, "ab"), *map(node, "cd")], 0.0).start == ("a", "b")


def test_undo_leaves_superseded_nodes_alone() -> None:
    moved = node("a", requested="third", mark=done_node("a").mark)
    assert states(undo(moved)) == {"a": NodeState.SUPERSEDED}
    undone = dataclasses.replace(moved, mark=UNDONE)
    assert undo(undone).nodes == ()

    superseded_during_it = undoing()
    superseded_during_it.decide([node("a", mark=UNDONE)], 0.0)
    assert states(superseded_during_it.decide([undone], 1.0)) == {"a": NodeState.SUPERSEDED}

    without_mark = undoing()
    without_mark.decide([node("a", mark=UNDONE)], 0.0)
    third_run = a_status("third", run_status.State.SUCCESS, phase="Done")
    replaced = node("a", requested="third", applied="third", status=third_run)
    assert states(without_mark.decide([replaced], 1.0)) == {"a": NodeState.SUPERSEDED}


def test_a_new_rollout_is_the_newest_in_spite_of_clocks() -> None:
    now = dt.datetime(2026, 6, 1, tzinfo=dt.UTC)
    ahead = marks.Mark(layout="x", before=None, started_at=now + dt.timedelta(minutes=5))
    first = goals.RolloutGoal(layout="y").of_rollout([node("a", mark=ahead)], now)
    marked = node("b", mark=first.mark(node("b")))

    later = now + dt.timedelta(minutes=1)
    again = goals.RolloutGoal(layout="y").of_rollout([node("a", mark=ahead), marked], later)

    assert first.started_at is not None
    assert first.started_at > now + dt.timedelta(minutes=5)
    assert again.started_at == first.started_at


def test_mark_has_the_layout_before_and_round_trips() -> None:
    forward = goals.RolloutGoal(layout=LAYOUT)
    for before, fleet_node in (
        (FORMER, node()),
        ("kept", node(requested=None, applied="kept")),
        (None, node(requested=None, applied="")),
    ):
        mark = marks.Mark(layout=LAYOUT, before=before)
        assert forward.mark(fleet_node) == mark == marks.parse(mark.to_json())
    dated = dataclasses.replace(UNDONE, started_at=dt.datetime(2026, 6, 1, tzinfo=dt.UTC))
    for mark in (UNDONE, dated):
        assert marks.parse(mark.to_json()) == mark
