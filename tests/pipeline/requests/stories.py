"""A node, what its owner does, and its agents one after the other."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping

from mig_manager.core import gpu_processes
from mig_manager.core.node import well_known
from mig_manager.errors import Reason
from tests import contract
from tests.node import agents, fakes, inboxes, node_rig, strikes
from tests.pipeline import lives

LAYOUT = "all-balanced"

Act = Callable[[], object]


class Story:
    """A node, what its owner does, and its agents, one after the other."""

    is_upgraded = False  # whether the agent that dies is of the version before

    def __init__(self, rig: node_rig.NodeRig, dies_at: int | None = None) -> None:
        self.rig = rig
        self.source = fakes.FakeConfig(agents.CONFIG)
        self.usage: dict[str, tuple[gpu_processes.GpuProcess, ...]] = {}
        self.reasons: list[Reason] = []
        self.deaths = 0
        self.on_death: Callable[[], object] = list
        self._began_at = len(rig.log)
        if dies_at is not None:
            rig.failing = {self._began_at + dies_at: strikes.Killed()}

    @property
    def calls(self) -> int:
        return len(self.rig.log) - self._began_at

    def run_agent(self, *acts: Act) -> None:
        """Run an agent; an act follows each of its runs. One that dies is replaced."""
        remaining = list(acts)
        while True:
            try:
                self._serve(remaining)
            except strikes.Killed:
                self.deaths += 1
                if self.is_upgraded:
                    self.rig.request_file.text = None
                    self.rig.annotations = dict(as_before(self.rig.annotations))
                self.on_death()
            else:
                return

    def _serve(self, acts: list[Act]) -> None:
        agent = agents.reconciler(
            self.rig,
            configs=self.source,
            limits={"has_custom_layouts": True},
            processes=lambda: self.usage,
        )

        def go_on(pause: inboxes.Pause) -> None:
            (acts.pop(0) if acts else pause.stop)()

        try:
            lives.run_agent(self.rig, agent, self.source, go_on)
        finally:
            self.reasons += (outcome.reason for outcome in agent.outcomes)

    def label(self, value: str | None) -> Act:
        """Return an act: set the label that requests a layout, or remove it."""

        def act() -> None:
            self.rig.labels.pop(well_known.CONFIG_LABEL, None)
            if value:
                self.rig.labels[well_known.CONFIG_LABEL] = value

        return act

    def file(self, text: str) -> Act:
        """Return an act: write the layout file."""
        return functools.partial(setattr, self.source, "text", text)


def as_before(annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what the version before would have written: it lacks a record, and some members."""
    for key, text in annotations.items():
        name = contract.ANNOTATIONS.get(key)
        if name is None:
            yield key, text
        elif (golden := contract.GOLDEN / f"{name}.jsonl").exists():
            members = set[str]().union(*map(json.loads, golden.read_text("utf-8").splitlines()))
            data = json.loads(text)
            yield key, json.dumps({each: data[each] for each in data if each in members})
