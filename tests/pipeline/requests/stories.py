"""A node, what its owner does, and its agents one after the other."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline import agent_loop
from tests.rigs.node import agents, fakes, inboxes, node_rig, strikes

Act = Callable[[], object]


class Kill(NamedTuple):
    """When an agent is killed."""

    at: int  # the call of a port, from 0
    loses_record: bool = False  # whether the record of the request is lost with it


class Story:
    """A node, what its owner does, and its agents, one after the other."""

    def __init__(self, rig: node_rig.NodeRig, kill: Kill | None = None) -> None:
        self.rig = rig
        self._loses_record = kill is not None and kill.loses_record
        self.source = fakes.FakeTextSource(agents.LAYOUTS_TEXT)
        self.reasons: list[Reason] = []
        self.kills = 0
        self.on_kill: Callable[[], object] = list
        self._began_at = len(rig.log)
        if kill is not None:
            rig.failures.add(self._began_at + kill.at, strikes.Killed())

    @property
    def calls(self) -> int:
        return len(self.rig.log) - self._began_at

    def run_agent(self, *acts: Act) -> None:
        """Run an agent; an act follows each of its runs. One that is killed is replaced."""
        remaining = list(acts)
        while True:
            try:
                self._serve(remaining)
            except strikes.Killed:
                self.kills += 1
                if self._loses_record:
                    self.rig.host_copy_file.text = None
                    self.rig.node_object.annotations.pop(well_known.REQUEST_ANNOTATION, None)
                self.on_kill()
            else:
                return

    def _serve(self, acts: list[Act]) -> None:
        agent = agents.new_agent(
            self.rig,
            layout_source=self.source,
            settings={"has_custom_layouts": True},
        )

        def go_on(pause: inboxes.Pause) -> None:
            (acts.pop(0) if acts else pause.stop)()

        try:
            agent_loop.run_agent(self.rig, agent, self.source, go_on)
        finally:
            self.reasons += (outcome.reason for outcome in agent.outcomes)

    def label(self, value: str | None) -> Act:
        """Return an act: set the label that requests a layout, or remove it."""

        def act() -> None:
            self.rig.node_object.labels.pop(well_known.CONFIG_LABEL, None)
            if value:
                self.rig.node_object.labels[well_known.CONFIG_LABEL] = value

        return act

    def file(self, text: str) -> Act:
        """Return an act: write the layout file."""
        return functools.partial(setattr, self.source, "text", text)
