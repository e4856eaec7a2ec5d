"""Whole rollouts: every one ends, and never are more nodes unavailable than allowed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.fleet import nodes, rollout
from tests.unit.test_rollout import LAYOUT, Phase, asked, busy, done, failed, node, rolling


class Simulation:
    """Nodes whose agents respond in any order and at any time, and whose labels show late."""

    def __init__(self, ends: list[str], rollout: rollout.Rollout) -> None:
        self.nodes = {f"n{index:02}": node(f"n{index:02}") for index in range(len(ends))}
        self._ends = dict(zip(self.nodes, ends, strict=True))
        self._unseen: dict[str, nodes.Node] = {}
        self._rollout = rollout

    @property
    def most_cordoned(self) -> int:
        return sum(each.view.is_unschedulable for each in self.nodes.values())

    @property
    def movable(self) -> list[str]:
        return [*self._unseen, *(n for n, each in self.nodes.items() if each.requested == LAYOUT)]

    def act(self, decision: rollout.Decision) -> None:
        for name in decision.withdraw:
            self.nodes[name] = node(name)
            self._rollout.withdrawn(name)
        for name in decision.start:
            self._unseen[name] = asked(name)
            self._rollout.requested(name)

    def move(self, name: str) -> None:
        if name in self._unseen:
            self.nodes[name] = self._unseen.pop(name)
        elif self._ends[name] != "dead":
            self.nodes[name] = self._next(self.nodes[name])

    def _next(self, now: nodes.Node) -> nodes.Node:
        last = now.status if now.status and now.status.config == LAYOUT else None
        if last is None or last.is_retried:
            return busy(now.name)
        if last.state is not model.State.PENDING:
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
        assert played.most_cordoned <= most
    assert phases[-1].is_over
    if phases[-1] is Phase.DONE:
        assert all(each.applied == LAYOUT for each in played.nodes.values())
