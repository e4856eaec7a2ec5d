"""What a rollout does next, decision by decision."""

import dataclasses
from typing import Any

import pytest

from mig_manager.cli.commands import rollout_course
from mig_manager.core import bar, model
from mig_manager.core.fleet import marks, nodes, rollout
from tests.unit.rollouts import (
    APPLIED,
    FORMER,
    LAYOUT,
    NodeState,
    Phase,
    asked,
    busy,
    decided,
    done,
    failed,
    node,
    rolling,
    run,
    states,
)


@pytest.mark.parametrize(
    ("there", "most", "start"),
    [
        pytest.param([*map(node, "edcba")], "2", ("a", "b"), id="as many as may be unavailable"),
        pytest.param(
            [node("a"), node("z", is_cordoned=True)],
            "1",
            ("z",),
            id="first one cordoned by others",
        ),
        pytest.param(
            [node(name, is_cordoned=True) for name in "abcdef"],
            "2",
            ("a", "b"),
            id="not all that are cordoned by others at once",
        ),
        pytest.param([done("a"), node("b")], "1", ("b",), id="another after one is applied"),
        pytest.param([failed("a"), node("b")], "1", ("b",), id="another after a failure"),
        pytest.param(
            [node("a", status=None, applied="", state=None, requested=None, gpus="published")],
            "1",
            ("a",),
            id="one with published GPUs and no status",
        ),
    ],
)
def test_nodes_start(there: list[nodes.Node], most: str, start: tuple[str, ...]) -> None:
    assert decided(*there, most=most).start == start


def test_a_failure_from_before_the_request_is_no_answer_to_it() -> None:
    ended = run(LAYOUT, model.State.FAILED, reason="InUse", startedAt="2026-01-01T00:00:00.5Z")
    before = node(requested=None, state=model.State.FAILED, status=ended)
    written = rollout.Goal(layout=LAYOUT).mark(before)
    assert written is not None
    mark = marks.parse(written.to_json())
    requested = dataclasses.replace(asked(state=model.State.FAILED, status=ended), mark=mark)

    decision = decided(requested, node("b"))

    assert states(decision) == {"a": NodeState.IN_PROGRESS, "b": NodeState.TO_DO}
    assert decision.start == ()


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [("3", 300, 3), ("10%", 300, 30), ("10%", 39, 3), ("1%", 5, 1), ("100%", 7, 7)],
)
def test_a_percentage_is_of_the_nodes_selected_and_one_at_least(
    most: str, count: int, expected: int
) -> None:
    assert rollout.RolloutLimits(max_unavailable=most).most(count) == expected


@pytest.mark.parametrize(
    "away",
    [
        {"is_cordoned": True},
        {"is_ready": False},
        {"state": model.State.PENDING},
        {"status": run(FORMER, model.State.FAILED, retryAt="2026-01-01T00:00:00Z")},
        {"requested": "another"},
    ],
    ids=lambda away: next(iter(away)),
)
def test_a_node_that_is_unavailable_already_or_about_to_be_counts(away: dict[str, Any]) -> None:
    decision = decided(node("a", **away), node("y"), node("z"))

    assert decision.unavailable == ("a",)
    assert "y" not in decision.start


def test_a_node_that_is_not_ready_or_has_another_manager_is_skipped() -> None:
    decision = decided(node("a", is_ready=False), most="5")
    assert (decision.start, states(decision)) == ((), {"a": NodeState.SKIPPED})
    assert decision.phase is Phase.FAILED

    decision = decided(node("a", status=None, applied=""), node("b"))
    assert (decision.unavailable, decision.start) == ((), ("b",))
    assert states(decision)["a"] is NodeState.SKIPPED


def test_a_requested_node_counts_before_its_label_shows_it() -> None:
    rolled = rolling()
    assert rolled.decide([node("a"), node("b")], 0.0).start == ("a",)
    rolled.requested("a")
    decision = rolled.decide([node("a"), node("b")], 1.0)
    assert decision.start == ()
    assert states(decision)["a"] is NodeState.IN_PROGRESS


def test_rollout_is_done_once_all_nodes_applied_its_layout() -> None:
    assert decided(done("a"), done("b")).phase is Phase.DONE
    assert states(decided(asked("a"), done("b"))) == {
        "a": NodeState.IN_PROGRESS,
        "b": NodeState.APPLIED,
    }


def test_the_live_table_lists_a_node_with_unreachable_gpus() -> None:
    whole = done("b").status
    assert whole
    partial = dataclasses.replace(whole, unreachable=("GPU 3",))
    decision = decided(done("a"), done("b", status=partial))

    shown = rollout_course.table(decision, "t", style=bar.Style(), size=(100, 24))

    assert [line.split()[0] for line in shown.splitlines()] == ["t:", "b"]
    assert "without unreachable GPU 3" in shown


def test_the_live_table_marks_where_it_cuts_a_line() -> None:
    name = "ip-10-0-12-34.eu-central-1.compute.internal"
    decision = decided(busy(name))

    wide, narrow = (
        rollout_course.table(decision, "t", style=bar.Style(), size=(columns, 24)).splitlines()
        for columns in (120, 44)
    )

    assert "…" not in "".join(wide)
    assert name in wide[1]
    assert [(len(line), line[-1]) for line in narrow] == [(43, "…")] * 2
    assert "ip-10-0-12-34.eu-cent…  in-progress" in narrow[1]


def test_a_failure_pauses_the_others_once_nodes_in_progress_have_ended() -> None:
    pausing = rolling("2", pauses=True)
    pausing.decide([busy("a"), busy("b"), node("c")], 0.0)
    assert pausing.decide([failed("a"), busy("b"), node("c")], 1.0).phase is Phase.PAUSING
    decision = pausing.decide([failed("a"), done("b"), node("c")], 2.0)
    assert (decision.phase, decision.start) == (Phase.PAUSED, ())
    assert [(each.name, each.reason, each.message) for each in decision.failures] == [
        ("a", "InUse", "in use")
    ]


def test_a_pause_stays_while_the_agent_retries() -> None:
    pausing = rolling("2", pauses=True)
    pausing.decide([busy("a"), node("b")], 0.0)
    pausing.decide([failed("a", is_retried=True), node("b")], 1.0)

    decision = pausing.decide([busy("a"), node("b")], 2.0)

    assert decision.phase is Phase.PAUSED
    assert [each.reason for each in decision.failures] == ["InUse"]


def test_an_agent_that_stopped_during_its_run_is_awaited_and_not_withdrawn() -> None:
    pausing = rolling("2", pauses=True)
    pausing.decide([busy("a"), node("b")], 0.0)
    ended = run(LAYOUT, model.State.FAILED, reason="Interrupted")
    stopped = asked("a", state=model.State.FAILED, status=ended)

    decision = pausing.decide([stopped, done("b")], 50.0)

    assert (decision.phase, decision.withdraw) == (Phase.ROLLING, ())
    assert states(decision)["a"] is NodeState.IN_PROGRESS
    assert pausing.decide([stopped, done("b")], 101.0).phase is not Phase.ROLLING


def test_earlier_failures_pause_nothing() -> None:
    decision = rolling("2", pauses=True).decide([failed("a"), node("b")], 0.0)
    assert (decision.phase, decision.start) == (Phase.ROLLING, ("b",))


def test_a_failure_of_the_last_node_ends_the_rollout() -> None:
    pausing = rolling(pauses=True)
    pausing.decide([done("a"), busy("b")], 0.0)

    assert pausing.decide([done("a"), failed("b")], 1.0).phase is Phase.FAILED


def test_a_retrying_node_counts_and_is_awaited_until_its_time_out() -> None:
    rolled = rolling()
    rolled.decide([busy("a")], 0.0)

    decision = rolled.decide([failed("a", is_retried=True), node("b")], 1.0)
    assert (decision.phase, decision.start, decision.unavailable) == (Phase.ROLLING, (), ("a",))
    assert rolled.decide([failed("a", is_retried=True)], 101.0).phase is Phase.FAILED


def test_a_request_without_response_is_withdrawn_and_makes_room() -> None:
    rolled = rolling()
    rolled.decide([asked("a"), node("b")], 0.0)
    assert rolled.decide([asked("a"), node("b")], 9.0).withdraw == ()

    decision = rolled.decide([asked("a"), node("b")], 10.0)
    assert decision.withdraw == ("a",)
    assert states(decision)["a"] is NodeState.NO_RESPONSE
    rolled.withdrawn("a")
    after = rolled.decide([node("a"), node("b")], 11.0)
    assert (after.withdraw, after.start) == ((), ("b",))
    assert states(after)["a"] is NodeState.NO_RESPONSE


def test_a_label_without_a_rollouts_mark_is_not_withdrawn() -> None:
    rolled = rolling()
    unmarked = asked("a", mark=None)
    rolled.decide([unmarked], 0.0)

    decision = rolled.decide([unmarked], 10.0)

    assert states(decision)["a"] is NodeState.NO_RESPONSE
    assert decision.withdraw == ()


def test_dead_agent_with_an_old_request_does_not_block_the_others() -> None:
    rolled = rolling()
    dead = node("z", requested="another", status=APPLIED)
    assert rolled.decide([node("b"), dead], 0.0).start == ("z",)
    # It is asked for the new layout in its decision; another rollout's node is not ours to judge.
    assert rolled.decide([node("b"), dead], 10.0).unavailable == ()


def test_node_times_out_but_not_while_it_waits_for_a_slot() -> None:
    rolled = rolling()
    for now_s in (0.0, 500.0):
        rolled.decide([busy("a", phase="Wait"), node("b")], now_s)
    there = [busy("a"), node("b")]
    assert states(rolled.decide(there, 599.0))["a"] is NodeState.IN_PROGRESS
    decision = rolled.decide(there, 600.0)
    assert states(decision)["a"] is NodeState.TIMED_OUT
    assert decision.failures[0].message == "not applied 100 s after the start"
    assert decision.start == ()


def test_a_rollout_that_can_neither_start_nor_await_a_node_stalls() -> None:
    rolled = rolling()
    stuck = [node("a"), node("b", is_ready=False)]
    phases = [rolled.decide(stuck, now_s).phase for now_s in (0.0, 9.0, 10.0)]
    assert phases == [Phase.ROLLING, Phase.ROLLING, Phase.STALLED]


def test_a_superseded_node_is_left_alone_and_a_deleted_one_is_forgotten() -> None:
    rolled = rolling()
    rolled.decide([busy("a")], 0.0)
    decision = rolled.decide([node("a", requested="third")], 1.0)
    assert (decision.start, states(decision)) == ((), {"a": NodeState.SUPERSEDED})
    (removed,) = rolled.decide([node("a", requested=None)], 1.5).nodes
    assert removed.message == "the label was removed meanwhile"
    assert rolled.decide([done("b")], 2.0).phase is Phase.DONE


# Undo


UNDONE = marks.Mark(layout=LAYOUT, before=FORMER, is_undone=True)


def undo(*there: nodes.Node) -> rollout.RolloutDecision:
    limits = rollout.RolloutLimits()
    return rollout.Rollout(rollout.Goal(layout=None), limits).decide(there, 0.0)


def test_undo_includes_the_nodes_with_a_rollouts_mark() -> None:
    assert states(undo(done("a"), node("b"))) == {"a": NodeState.TO_DO}
    assert rollout.Goal(layout=None).target(done("a")) == FORMER
    assert rollout.Goal(layout=None).mark(done("a")) == UNDONE


def test_an_interrupted_undo_continues() -> None:
    decision = undo(node("a", mark=UNDONE), done("b"))
    assert states(decision) == {"a": NodeState.APPLIED, "b": NodeState.TO_DO}
    assert decision.start == ("b",)


def test_undo_of_a_node_that_had_no_label_removes_it() -> None:
    mark = marks.Mark(layout=LAYOUT, before=None)
    unlabelled = node("a", requested=None, mark=dataclasses.replace(mark, is_undone=True))
    assert rollout.Goal(layout=None).target(done("a", mark=mark)) is None
    assert undo(unlabelled).phase is Phase.DONE


def test_undo_leaves_superseded_nodes_alone() -> None:
    moved = node("a", requested="third", mark=done("a").mark)
    assert states(undo(moved)) == {"a": NodeState.SUPERSEDED}
    assert undo(dataclasses.replace(moved, mark=UNDONE)).nodes == ()


def test_mark_has_the_layout_before_and_round_trips() -> None:
    forward = rollout.Goal(layout=LAYOUT)
    for before, there in (
        (FORMER, node()),
        ("kept", node(requested=None, applied="kept")),
        (None, node(requested=None, applied="")),
    ):
        mark = marks.Mark(layout=LAYOUT, before=before)
        assert forward.mark(there) == mark == marks.parse(mark.to_json())
    assert marks.parse(UNDONE.to_json()) == UNDONE
