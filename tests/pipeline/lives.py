"""The agent's own loop on a node in memory, in one thread: time passes by the node's clock."""

import contextlib
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

from mig_manager.agent import intake, loop, outcomes, settings
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import node_object, well_known
from tests.node import fakes, scenes

RETRY_S, CHECK_S = 5.0, 60.0
"""The pause before each retry, and between drift checks."""
_PAUSES = settings.Limits(
    retry_initial_s=RETRY_S, retry_max_s=RETRY_S, drift_check_interval_s=CHECK_S
)


class Rested(BaseException):
    """Ends an agent in a pause, as a kill would."""


class Pause(NamedTuple):
    """A pause of the agent, in which nothing newer is requested."""

    is_at_rest: bool
    seconds: float
    stop: Callable[[], None]
    """Ends the agent as its service does."""


OnPause = Callable[[Pause], object]
"""Lets time pass, or something happen; it may end the agent, also by raising ``Rested``."""


class _Inbox(intake.Inbox):
    """Reports label, annotation and file at each check of a request, and sleeps in no pause."""

    def __init__(self, rig: fakes.NodeRig, configs: fakes.FakeConfig, on_pause: OnPause) -> None:
        super().__init__(on_check=self._report)
        self._rig = rig
        self._configs = configs
        self._on_pause = on_pause
        self._reported: Hashable = None
        self._text = configs.text

    def wait_until_superseded(
        self, generation: int, *, at_rest: bool = False, timeout_s: float | None = None
    ) -> bool:
        self._report()
        if not self._is_over(generation, at_rest=at_rest):
            seconds = math.inf if timeout_s is None else timeout_s
            self._on_pause(Pause(at_rest, seconds, self.stop))
            self._report()
        return self._is_over(generation, at_rest=at_rest)

    def wait(self, generation: int, seconds: float) -> None:
        self._rig.clock.wait(seconds)

    def pause(self, generation: int, seconds: float) -> None:
        self._rig.clock.wait(seconds)

    def _report(self) -> None:
        requested = requested_of(self._rig)
        if requested != self._reported:
            self._reported = requested
            view = node_object.NodeView(
                name="node-a",
                labels=dict(self._rig.labels),
                annotations=dict(self._rig.annotations),
                allocatable={},
            )
            is_on_demand = view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND
            self.put_on_demand(is_on_demand=is_on_demand)
            name = view.labels.get(well_known.CONFIG_LABEL)
            self.put_label(
                name, node_uid=self._rig.node_uid, custom=custom_layouts.of_request(view)
            )
        if self._configs.text != self._text:
            self._text = self._configs.text
            self.put_file_change()


def request(
    rig: fakes.NodeRig, layout: str | None, custom: custom_layouts.Custom | None = None
) -> None:
    """Set what requests a layout on the Node, or remove it."""
    partitioning = well_known.ON_DEMAND if custom and custom.is_on_demand else None
    for values, key, value in (
        (rig.labels, well_known.CONFIG_LABEL, layout),
        (rig.labels, well_known.PARTITIONING_LABEL, partitioning),
        (rig.annotations, well_known.LAYOUT_ANNOTATION, custom and custom.text),
    ):
        values.pop(key, None)
        if value:
            values[key] = value


def register_again(rig: fakes.NodeRig) -> None:
    """Delete the Node, and let its owner, kubelet and the operator write what they know of it."""
    layout = rig.annotations.get(well_known.LAYOUT_ANNOTATION)
    rig.annotations = {well_known.LAYOUT_ANNOTATION: layout} if layout else {}
    for key in (well_known.STATE_LABEL, well_known.APPLIED_LABEL):
        rig.labels.pop(key, None)
    rig.labels |= {
        key: "true" for key, value in rig.labels.items() if value == well_known.PAUSED_VALUE
    }
    rig.node_uid += "-again"
    rig.has_hold_taint, rig.kubelet.withdrawn = False, None


def requested_of(rig: fakes.NodeRig) -> tuple[str | None, ...]:
    """Return what requests a layout on the Node, and which Node it is."""
    return (
        rig.labels.get(well_known.CONFIG_LABEL),
        rig.labels.get(well_known.PARTITIONING_LABEL),
        rig.annotations.get(well_known.LAYOUT_ANNOTATION),
        rig.node_uid,
    )


def live(
    rig: fakes.NodeRig,
    agent: scenes.AgentInMemory,
    configs: fakes.FakeConfig,
    on_pause: OnPause,
) -> outcomes.Outcome | None:
    """Run an agent's loop until it is ended; return the outcome of the last run that ended."""
    inbox = _Inbox(rig, configs, on_pause)
    with contextlib.suppress(Rested):
        loop.Agent(agent, inbox, _PAUSES, monotonic=rig.clock.monotonic).serve()
    return agent.ended[-1] if agent.ended else None
