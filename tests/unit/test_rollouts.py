"""What a rollout does next, judged turn by turn."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_manager.cli.render import rollout_report
from mig_manager.core import bar, model
from mig_manager.core.fleet import nodes, rollout

LAYOUT, FORMER = "new", "old"
Standing = rollout.Standing
Phase = rollout.Phase
SUCCESS, PENDING, FAILED = (
    model.State.SUCCESS.value,
    model.State.PENDING.value,
    model.State.FAILED.value,
)
IN_FORCE = nodes.Told(config=FORMER, state=SUCCESS, phase="Done")


def node(name: str = "a", **changed: object) -> nodes.Node:
    """A node at rest in the former layout."""
    plain = nodes.Node(
        name=name,
        version="1",
        wanted=FORMER,
        state=SUCCESS,
        applied=FORMER,
        is_ready=True,
        is_cordoned=False,
        told=IN_FORCE,
    )
    return dataclasses.replace(plain, **changed)  # type: ignore[arg-type]


def asked(name: str = "a", **changed: object) -> nodes.Node:
    """A node that the rollout has asked, and whose agent has not reacted."""
    mark = nodes.Mark(layout=LAYOUT, before=FORMER)
    return dataclasses.replace(node(name, wanted=LAYOUT, mark=mark), **changed)  # type: ignore[arg-type]


def busy(name: str = "a", *, phase: str = "Drain") -> nodes.Node:
    told = nodes.Told(config=LAYOUT, state=PENDING, phase=phase)
    return asked(name, state=PENDING, is_cordoned=phase == "Drain", told=told)


def done(name: str = "a") -> nodes.Node:
    told = nodes.Told(config=LAYOUT, state=SUCCESS, phase="Done", reason="Applied")
    return asked(name, state=SUCCESS, applied=LAYOUT, told=told)


def failed(name: str = "a", *, is_retried: bool = False) -> nodes.Node:
    told = nodes.Told(
        config=LAYOUT, state=FAILED, reason="InUse", message="held", is_retried=is_retried
    )
    return asked(name, state=FAILED, told=told)


def mind(most: str = "1", *, pauses: bool = False) -> rollout.Rollout:
    limits = rollout.Limits(
        max_unavailable=most, pauses=pauses, node_timeout_s=100, silence_timeout_s=10
    )
    return rollout.Rollout(nodes.Forward(layout=LAYOUT), limits)


def judged(*nodes: nodes.Node, most: str = "1", now_s: float = 0.0) -> rollout.Turn:
    return mind(most).judge(nodes, now_s)


def standings(turn: rollout.Turn) -> dict[str, Standing]:
    return {each.name: each.standing for each in turn.nodes}


def test_as_many_nodes_are_asked_as_may_be_unavailable() -> None:
    turn = judged(*(node(name) for name in "edcba"), most="2")

    assert turn.start == ("a", "b")


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [("3", 300, 3), ("10%", 300, 30), ("10%", 39, 3), ("1%", 5, 1), ("100%", 7, 7)],
)
def test_a_percentage_is_of_the_nodes_selected_and_one_at_least(
    most: str, count: int, expected: int
) -> None:
    assert rollout.Limits(max_unavailable=most).most(count) == expected


@pytest.mark.parametrize(
    "away",
    [
        {"is_cordoned": True},
        {"is_ready": False},
        {"state": PENDING},
        {"told": nodes.Told(config=FORMER, state=FAILED, is_retried=True)},
        {"wanted": "another"},
    ],
    ids=lambda away: next(iter(away)),
)
def test_a_node_that_is_unavailable_already_or_about_to_be_counts(away: dict[str, object]) -> None:
    others = [node("y"), node("z")]

    turn = judged(node("a", **away), *others, most="1")

    assert turn.unavailable == ("a",)
    assert "y" not in turn.start


def test_a_node_that_is_cordoned_by_others_costs_nothing_and_comes_first() -> None:
    turn = judged(node("a"), node("z", is_cordoned=True), most="1")

    assert turn.start == ("z",)


def test_many_nodes_that_are_cordoned_by_others_do_not_all_begin_at_once() -> None:
    turn = judged(*(node(name, is_cordoned=True) for name in "abcdef"), most="2")

    assert turn.start == ("a", "b")


def test_nothing_is_asked_of_a_node_that_is_not_ready() -> None:
    turn = judged(node("a", is_ready=False), most="5")

    assert turn.start == ()
    assert standings(turn) == {"a": Standing.LEFT_OUT}
    assert turn.phase is Phase.FAILED


def test_a_node_that_was_asked_counts_before_its_label_shows_it() -> None:
    rollout = mind()
    assert rollout.judge([node("a"), node("b")], 0.0).start == ("a",)
    rollout.asked("a")

    turn = rollout.judge([node("a"), node("b")], 1.0)

    assert turn.start == ()
    assert standings(turn)["a"] is Standing.UNDER_WAY


def test_a_node_in_force_makes_room_for_the_next() -> None:
    turn = judged(done("a"), node("b"))

    assert standings(turn)["a"] is Standing.IN_FORCE
    assert turn.start == ("b",)


def test_all_in_force_is_the_end() -> None:
    assert judged(done("a"), done("b")).phase is Phase.DONE


def test_the_live_table_lists_a_node_with_unreachable_gpus() -> None:
    told = nodes.Told(
        config=LAYOUT, state=SUCCESS, phase="Done", reason="Applied", unreachable=("GPU 3",)
    )
    turn = judged(done("a"), dataclasses.replace(done("b"), told=told))

    shown = rollout_report.table(turn, "t", style=bar.Style(), size=(100, 24))

    assert [line.split()[0] for line in shown.splitlines()] == ["t:", "b"]
    assert "without unreachable GPU 3" in shown


def test_an_old_success_is_no_success() -> None:
    assert standings(judged(asked("a")))["a"] is Standing.UNDER_WAY


def test_nothing_is_asked_of_a_node_that_nvidias_manager_serves() -> None:
    turn = judged(node("a", told=None, applied=""), node("b"), most="1")

    assert turn.unavailable == ()
    assert turn.start == ("b",)
    assert standings(turn)["a"] is Standing.LEFT_OUT


def test_a_node_whose_agent_has_told_of_its_gpus_alone_is_asked() -> None:
    fresh = node("a", told=None, applied="", state="", wanted=None, gpus="told")

    assert judged(fresh).start == ("a",)


def test_a_failure_lets_the_others_go_on_unless_it_shall_pause() -> None:
    assert judged(failed("a"), node("b")).start == ("b",)

    pausing = mind(pauses=True)
    pausing.judge([busy("a"), node("b")], 0.0)
    turn = pausing.judge([failed("a"), node("b")], 1.0)
    assert turn.start == ()
    assert turn.phase is Phase.PAUSED
    assert [(each.name, each.reason, each.message) for each in turn.failures] == [
        ("a", "InUse", "held")
    ]


def test_a_pause_waits_for_what_is_under_way() -> None:
    pausing = mind("2", pauses=True)
    pausing.judge([busy("a"), busy("b"), node("c")], 0.0)

    assert pausing.judge([failed("a"), busy("b"), node("c")], 1.0).phase is Phase.PAUSING
    assert pausing.judge([failed("a"), done("b"), node("c")], 2.0).phase is Phase.PAUSED


def test_a_pause_stands_although_the_agent_tries_again_meanwhile() -> None:
    pausing = mind("2", pauses=True)
    pausing.judge([busy("a"), node("b")], 0.0)
    pausing.judge([failed("a", is_retried=True), node("b")], 1.0)

    turn = pausing.judge([busy("a"), node("b")], 2.0)

    assert turn.phase is Phase.PAUSED
    assert [each.reason for each in turn.failures] == ["InUse"]


def test_what_had_failed_before_pauses_nothing() -> None:
    resumed = mind("2", pauses=True)

    turn = resumed.judge([failed("a"), node("b")], 0.0)

    assert (turn.phase, turn.start) == (Phase.ROLLING, ("b",))


def test_a_failure_of_the_last_node_is_no_pause_but_the_end() -> None:
    pausing = mind(pauses=True)
    pausing.judge([done("a"), busy("b")], 0.0)

    assert pausing.judge([done("a"), failed("b")], 1.0).phase is Phase.FAILED


def test_a_node_that_is_tried_again_counts_and_is_waited_for_in_its_time() -> None:
    rollout = mind()
    rollout.judge([busy("a")], 0.0)

    turn = rollout.judge([failed("a", is_retried=True), node("b")], 1.0)
    assert (turn.phase, turn.start, turn.unavailable) == (Phase.ROLLING, (), ("a",))
    assert rollout.judge([failed("a", is_retried=True)], 101.0).phase is Phase.FAILED


def test_a_node_on_which_nobody_reacts_is_given_back_and_makes_room() -> None:
    rollout = mind()
    rollout.judge([asked("a"), node("b")], 0.0)
    assert rollout.judge([asked("a"), node("b")], 9.0).retract == ()

    turn = rollout.judge([asked("a"), node("b")], 10.0)
    assert turn.retract == ("a",)
    assert standings(turn)["a"] is Standing.SILENT
    rollout.retracted("a")
    after = rollout.judge([node("a"), node("b")], 11.0)
    assert (after.retract, after.start) == ((), ("b",))
    assert standings(after)["a"] is Standing.SILENT


def test_a_label_that_no_rollout_has_set_is_not_taken_back() -> None:
    rollout = mind()
    unmarked = asked("a", mark=None)
    rollout.judge([unmarked], 0.0)

    turn = rollout.judge([unmarked], 10.0)

    assert standings(turn)["a"] is Standing.SILENT
    assert turn.retract == ()


def test_a_dead_agent_with_an_old_wish_does_not_hold_the_others_up_for_ever() -> None:
    rollout = mind()
    dead = node("z", wanted="another", told=IN_FORCE)
    away = dataclasses.replace(dead, is_ready=True)
    assert rollout.judge([node("b"), away], 0.0).start == ("z",)
    # It is asked for the new layout in its turn; another rollout's node is not ours to judge.
    assert rollout.judge([node("b"), away], 10.0).unavailable == ()


def test_a_node_that_takes_too_long_is_late_and_goes_on_counting() -> None:
    rollout = mind()
    rollout.judge([busy("a"), node("b")], 0.0)

    turn = rollout.judge([busy("a"), node("b")], 100.0)

    assert standings(turn)["a"] is Standing.LATE
    assert turn.start == ()


def test_waiting_for_a_slot_takes_no_time() -> None:
    rollout = mind()
    rollout.judge([busy("a", phase="Wait")], 0.0)
    rollout.judge([busy("a", phase="Wait")], 500.0)

    assert standings(rollout.judge([busy("a")], 599.0))["a"] is Standing.UNDER_WAY
    assert standings(rollout.judge([busy("a")], 600.0))["a"] is Standing.LATE


def test_a_rollout_that_can_begin_nothing_and_waits_for_nothing_of_its_own_stalls() -> None:
    rollout = mind()
    stuck = [node("a"), node("b", is_ready=False)]

    assert rollout.judge(stuck, 0.0).phase is Phase.ROLLING
    assert rollout.judge(stuck, 9.0).phase is Phase.ROLLING
    assert rollout.judge(stuck, 10.0).phase is Phase.STALLED


def test_a_node_that_somebody_else_asks_for_something_else_is_let_be() -> None:
    rollout = mind()
    rollout.judge([busy("a")], 0.0)

    turn = rollout.judge([node("a", wanted="third")], 1.0)

    assert standings(turn)["a"] is Standing.OTHER_WISH
    assert turn.start == ()


def test_a_node_that_is_deleted_is_forgotten() -> None:
    rollout = mind()
    rollout.judge([failed("a"), done("b")], 0.0)

    assert rollout.judge([done("b")], 1.0).phase is Phase.DONE


# -- the way back -----------------------------------------------------------------------------


def back() -> rollout.Rollout:
    return rollout.Rollout(nodes.Back(), rollout.Limits(max_unavailable="1"))


def test_undo_is_about_the_nodes_that_a_rollout_has_asked() -> None:
    turn = back().judge([done("a"), node("b")], 0.0)

    assert standings(turn) == {"a": Standing.TO_DO}
    assert nodes.Back().target(done("a")) == FORMER
    assert nodes.Back().mark(done("a")) == nodes.Mark(layout=LAYOUT, before=FORMER, is_undone=True)


def test_undo_is_gone_on_with_where_it_was_interrupted() -> None:
    mark = nodes.Mark(layout=LAYOUT, before=FORMER, is_undone=True)

    turn = back().judge([node("a", mark=mark), done("b")], 0.0)

    assert standings(turn) == {"a": Standing.IN_FORCE, "b": Standing.TO_DO}
    assert turn.start == ("b",)


def test_undo_of_a_node_that_had_no_label_removes_it() -> None:
    mark = nodes.Mark(layout=LAYOUT, before=None)
    unlabelled = node("a", wanted=None, mark=dataclasses.replace(mark, is_undone=True))

    assert nodes.Back().target(dataclasses.replace(done("a"), mark=mark)) is None
    assert back().judge([unlabelled], 0.0).phase is Phase.DONE


def test_undo_lets_be_who_was_asked_for_something_else_since() -> None:
    moved = dataclasses.replace(node("a", wanted="third"), mark=done("a").mark)
    undone = nodes.Mark(layout=LAYOUT, before=FORMER, is_undone=True)

    assert standings(back().judge([moved], 0.0)) == {"a": Standing.OTHER_WISH}
    assert back().judge([dataclasses.replace(moved, mark=undone)], 0.0).nodes == ()


def test_a_node_that_is_asked_remembers_what_it_was_asked_for_before() -> None:
    forward = nodes.Forward(layout=LAYOUT)

    assert forward.mark(node()).before == FORMER
    assert forward.mark(node(wanted=None, applied="kept")).before == "kept"
    assert forward.mark(node(wanted=None, applied="")).before is None


@pytest.mark.parametrize("text", [None, "", "null", "[]", "{}", "[" * 9999, '{"layout": 1}'])
def test_annotations_that_make_no_sense_say_nothing(text: str | None) -> None:
    assert nodes.mark(text) is None
    assert nodes.told(text) is None


def test_a_mark_is_read_as_it_was_written() -> None:
    for mark in (
        nodes.Mark(layout="x", before=None),
        nodes.Mark(layout="x", before="y", is_undone=True),
    ):
        assert nodes.mark(mark.to_json()) == mark


# -- all of it at once ------------------------------------------------------------------------


class Simulation:
    """Nodes whose agents react in any order and at any time, and whose labels show late."""

    def __init__(self, ends: list[str], rollout: rollout.Rollout) -> None:
        self.nodes = {f"n{index:02}": node(f"n{index:02}") for index in range(len(ends))}
        self._ends = dict(zip(self.nodes, ends, strict=True))
        self._unseen: dict[str, nodes.Node] = {}
        self._rollout = rollout

    @property
    def most_cordoned(self) -> int:
        return sum(each.is_cordoned for each in self.nodes.values())

    @property
    def movable(self) -> list[str]:
        return [*self._unseen, *(n for n, each in self.nodes.items() if each.wanted == LAYOUT)]

    def act(self, turn: rollout.Turn) -> None:
        for name in turn.retract:
            self.nodes[name] = node(name)
            self._rollout.retracted(name)
        for name in turn.start:
            self._unseen[name] = asked(name)
            self._rollout.asked(name)

    def move(self, name: str) -> None:
        if name in self._unseen:
            self.nodes[name] = self._unseen.pop(name)
        elif self._ends[name] != "dead":
            self.nodes[name] = self._next(self.nodes[name])

    def _next(self, now: nodes.Node) -> nodes.Node:
        told = now.told if now.told and now.told.config == LAYOUT else None
        if told is None or told.is_retried:
            return busy(now.name)
        if told.state != PENDING:
            return now
        match self._ends[now.name]:
            case "success":
                return done(now.name)
            case "failed":
                return failed(now.name)
            case _:
                return failed(now.name, is_retried=True)


@settings(max_examples=200, deadline=None)
@given(
    ends=st.lists(
        st.sampled_from(["success", "success", "success", "failed", "retried", "dead"]),
        min_size=1,
        max_size=12,
    ),
    most=st.integers(1, 4),
    pauses=st.sampled_from([True, False]),
    steps=st.data(),
)
def test_never_are_more_nodes_unavailable_than_may_be_and_it_always_ends(
    ends: list[str], *, most: int, pauses: bool, steps: st.DataObject
) -> None:
    rollout = mind(str(most), pauses=pauses)
    played = Simulation(ends, rollout)
    phases = []
    for number in range(400):
        turn = rollout.judge(list(played.nodes.values()), 5.0 * number)
        phases.append(turn.phase)
        if turn.phase.is_over:
            break
        played.act(turn)
        if played.movable:
            played.move(steps.draw(st.sampled_from(played.movable)))
        assert played.most_cordoned <= most
    assert phases[-1].is_over
    if phases[-1] is Phase.DONE:
        assert all(each.applied == LAYOUT for each in played.nodes.values())
