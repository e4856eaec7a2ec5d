"""The agent's inbox on a node in memory: time passes by the node's clock, in one thread."""

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

from mig_manager.agent import intake
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import node_object, well_known
from tests.rigs.node import fakes, node_rig


class Pause(NamedTuple):
    """A pause of the agent, in which nothing newer is requested."""

    is_at_rest: bool
    seconds: float
    stop: Callable[[], None]  # ends the agent as its service does


OnPause = Callable[[Pause], object]  # lets time pass, or something happen


class Inbox(intake.Inbox):
    """Sleeps in no pause; ``report`` may put news at each check of a request."""

    def __init__(
        self,
        clock: fakes.FakeClock,
        on_pause: OnPause = lambda _pause: None,
        *,
        report: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(on_check=report)
        self._clock = clock
        self._on_pause = on_pause
        self._report = report

    def request(self, layout: str) -> intake.ReceivedRequest:
        """Request a layout; return the request as the loop receives it."""
        self.put_label(layout)
        received = self.next(0)
        assert received is not None
        return received

    def wait_until_superseded(
        self, generation: int, *, at_rest: bool = False, timeout_s: float | None = None
    ) -> bool:
        self._report()
        if not self.is_over(generation, at_rest=at_rest):
            seconds = math.inf if timeout_s is None else timeout_s
            self._on_pause(Pause(at_rest, seconds, self.stop))
            self._report()
        return self.is_over(generation, at_rest=at_rest)

    def wait(self, generation: int, seconds: float) -> None:
        self._clock.wait(seconds)

    def pause(self, generation: int, seconds: float) -> None:
        self._clock.wait(seconds)


class NodeInbox(Inbox):
    """Reports label, annotation and file as a watch would."""

    def __init__(
        self,
        rig: node_rig.NodeRig,
        on_pause: OnPause = lambda _pause: None,
        *,
        layout_source: fakes.FakeTextSource | None = None,
    ) -> None:
        super().__init__(rig.clock, on_pause, report=self._read)
        self._rig = rig
        self._layout_source = layout_source
        self._last_request: Hashable = None
        self._text = layout_source.text if layout_source else ""

    def _read(self) -> None:
        request = requested_of(self._rig)
        if request != self._last_request:
            self._last_request = request
            view = node_object.NodeView(
                name="node-a",
                labels=dict(self._rig.node_object.labels),
                annotations=dict(self._rig.node_object.annotations),
                allocatable={},
            )
            is_on_demand = view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND
            self.put_on_demand(is_on_demand=is_on_demand)
            name = view.labels.get(well_known.CONFIG_LABEL)
            self.put_label(
                name, node_uid=self._rig.node_object.uid, custom=custom_layouts.of_request(view)
            )
        if self._layout_source is not None and self._layout_source.text != self._text:
            self._text = self._layout_source.text
            self.put_file_change()


def requested_of(rig: node_rig.NodeRig) -> tuple[str | None, ...]:
    """Return what requests a layout on the Node, and which Node it is."""
    return (
        rig.node_object.labels.get(well_known.CONFIG_LABEL),
        rig.node_object.labels.get(well_known.PARTITIONING_LABEL),
        rig.node_object.annotations.get(well_known.LAYOUT_ANNOTATION),
        rig.node_object.uid,
    )
