"""The agent's own loop on a node in memory, in one thread: time passes by the node's clock."""

import contextlib

from mig_manager.agent import agent_settings, loop, outcomes
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import well_known
from tests.rigs.node import agents, fakes, inboxes, node_rig

RETRY_S, CHECK_S = 5.0, 60.0  # the pause before each retry, and between drift checks
_PAUSES = agent_settings.RunSettings(
    retry_initial_s=RETRY_S, retry_max_s=RETRY_S, drift_check_interval_s=CHECK_S
)


class EndOfPause(BaseException):
    """Ends an agent in a pause, as a kill would."""


def request(
    rig: node_rig.NodeRig, layout: str | None, custom: custom_layouts.CustomRequest | None = None
) -> None:
    """Set what requests a layout on the Node, or remove it."""
    partitioning = well_known.ON_DEMAND if custom and custom.is_on_demand else None
    for values, key, value in (
        (rig.node_object.labels, well_known.CONFIG_LABEL, layout),
        (rig.node_object.labels, well_known.PARTITIONING_LABEL, partitioning),
        (rig.node_object.annotations, well_known.LAYOUT_ANNOTATION, custom and custom.text),
    ):
        values.pop(key, None)
        if value:
            values[key] = value


def register_again(rig: node_rig.NodeRig) -> None:
    """Delete the Node, and let its owner, kubelet and the operator write what they know of it."""
    layout = rig.node_object.annotations.get(well_known.LAYOUT_ANNOTATION)
    rig.node_object.annotations = {well_known.LAYOUT_ANNOTATION: layout} if layout else {}
    for key in (well_known.STATE_LABEL, well_known.APPLIED_LABEL):
        rig.node_object.labels.pop(key, None)
    rig.node_object.labels |= {
        key: "true"
        for key, value in rig.node_object.labels.items()
        if value == well_known.PAUSED_VALUE
    }
    rig.node_object.uid += "-again"
    rig.node_object.has_reconfiguring_taint, rig.kubelet.hidden = False, None


def run_agent(
    rig: node_rig.NodeRig,
    agent: agents.AgentInMemory,
    layout_source: fakes.FakeTextSource,
    on_pause: inboxes.OnPause,
) -> outcomes.Outcome | None:
    """Run an agent's loop until it is ended, also by ``EndOfPause``; return its last outcome."""
    inbox = inboxes.NodeInbox(rig, on_pause, layout_source=layout_source)
    with contextlib.suppress(EndOfPause):
        loop.AgentLoop(agent, inbox, _PAUSES, monotonic=rig.clock.monotonic).serve()
    return agent.outcomes[-1] if agent.outcomes else None
