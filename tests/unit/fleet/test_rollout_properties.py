"""Whole rollouts at random, within their limits; and what one custom layout says of the next."""

import dataclasses

import hypothesis
from hypothesis import strategies as st

from mig_manager.core.fleet import fleet_nodes, goals, marks, rollout
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.unit.fleet.rollouts import (
    LAYOUT,
    NodeState,
    Phase,
    a_status,
    busy_node,
    done_node,
    failed_node,
    node,
    requested_node,
    rolling,
    states,
)


class Simulation:
    """Nodes whose agents respond in any order and at any time, and whose labels show late."""

    def __init__(self, ends: list[str], course: rollout.Rollout) -> None:
        self.nodes = {f"n{index:02}": node(f"n{index:02}") for index in range(len(ends))}
        self._ends = dict(zip(self.nodes, ends, strict=True))
        self._unseen: dict[str, fleet_nodes.FleetNode] = {}
        self._rollout = course

    @property
    def movable(self) -> list[str]:
        return [*self._unseen, *(n for n, each in self.nodes.items() if each.requested == LAYOUT)]

    def act(self, decision: rollout.RolloutDecision) -> None:
        for name in decision.withdraw:
            self.nodes[name] = node(name)
            self._rollout.record_withdrawal(name)
        for name in decision.start:
            self._unseen[name] = requested_node(name)
            self._rollout.record_request(name)

    def move(self, name: str) -> None:
        if name in self._unseen:
            self.nodes[name] = self._unseen.pop(name)
            return
        status, end = self.nodes[name].status, self._ends[name]
        last = status if status and status.layout == LAYOUT else None
        if end == "dead":
            return
        if last is None or last.is_retried:
            self.nodes[name] = busy_node(name)
        elif last.state is run_status.State.PENDING:
            is_done = end == "success"
            self.nodes[name] = (
                done_node(name) if is_done else failed_node(name, is_retried=end == "retried")
            )


@hypothesis.given(
    ends=st.lists(
        st.sampled_from(["success", "success", "success", "failed", "retried", "dead"]),
        min_size=1,
        max_size=12,
    ),
    most=st.integers(1, 4),
    pauses=st.sampled_from([True, False]),
    steps=st.data(),
)
def test_no_more_nodes_are_unavailable_than_allowed_and_every_rollout_ends(
    ends: list[str], *, most: int, pauses: bool, steps: st.DataObject
) -> None:
    rolled = rolling(str(most), pauses=pauses)
    played = Simulation(ends, rolled)
    phases = []
    for number in range(400):
        decision = rolled.decide(list(played.nodes.values()), 5.0 * number)
        phases.append(decision.phase)
        if decision.phase.is_over:
            break
        played.act(decision)
        if played.movable:
            played.move(steps.draw(st.sampled_from(played.movable)))
        assert sum(each.is_unavailable for each in played.nodes.values()) <= most
    assert phases[-1].is_over
    if phases[-1] is Phase.DONE:
        assert all(each.applied == LAYOUT for each in played.nodes.values())


def with_custom(text: str, *, reported: str) -> fleet_nodes.FleetNode:
    """A node whose annotation holds ``text``, and whose agent has applied ``reported``."""
    status = a_status(
        "custom",
        run_status.State.SUCCESS,
        phase="Done",
        annotationHash=custom_layouts.CustomRequest(node_name="a", text=reported).annotation_hash,
    )
    plain = node(requested="custom", applied="custom", status=status)
    annotated = dataclasses.replace(plain.view, annotations={well_known.LAYOUT_ANNOTATION: text})
    return dataclasses.replace(plain, view=annotated)


@hypothesis.given(text=st.text(min_size=1), reported=st.text(min_size=1))
def test_status_of_one_custom_layout_does_not_count_for_the_next(text: str, reported: str) -> None:
    fleet_node = with_custom(text, reported=reported)
    is_same = text == reported
    assert (fleet_node.current_status is not None) is is_same
    assert fleet_node.is_finished is is_same
    assert fleet_node.has_responded is is_same


def test_an_undo_waits_for_the_custom_layout_that_the_annotation_holds_now() -> None:
    mark = marks.Mark(layout=LAYOUT, before="custom", is_undone=True)
    undo = rollout.Rollout(
        goals.RolloutGoal(layout=None),
        goals.RolloutLimits(node_timeout_s=100, silence_timeout_s=10),
    )
    for reported, state in (("one", NodeState.PENDING), ("two", NodeState.SUCCESS)):
        fleet_node = dataclasses.replace(with_custom("two", reported=reported), mark=mark)
        assert states(undo.decide([fleet_node], 0.0)) == {"a": state}
