"""Requests for the layout ``custom`` of a node in memory."""

from typing import Any

from mig_manager.agent import outcomes
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.rigs import layout_table
from tests.rigs.node import agents, node_rig, nodes

ON = {"has_custom_layouts": True}


def document(rules: str) -> str:
    return f"version: v1\nmig-configs:\n  mine:\n{rules}"


CHANGED = document(layout_table.rule_line("[0]", layout_table.counts_of("one-slice")) + "\n")
"""For it the device ``2g.10gb`` of GPU 0 goes on a balanced node, and nothing else."""

BALANCED = document(layout_table.rule_line("[0]", layout_table.counts_of("all-balanced")) + "\n")


def custom_layout(
    text: str | None = CHANGED, *, is_on_demand: bool = False
) -> custom_layouts.CustomRequest:
    return custom_layouts.CustomRequest(node_name="node-a", text=text, is_on_demand=is_on_demand)


def request_custom(
    rig: node_rig.NodeRig,
    requested: custom_layouts.CustomRequest | None = None,
    *,
    by: agents.AgentInMemory | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> outcomes.Outcome:
    """Request ``custom`` of a node whose agent allows it."""
    agent = by or agents.new_agent(rig, settings=ON if settings is None else settings)
    return agents.run(rig, "custom", by=agent, custom=requested or custom_layout(), **options)


def published_status(rig: node_rig.NodeRig) -> run_status.PublishedStatus:
    return run_status.parse(rig.node_object.annotations[well_known.STATUS_ANNOTATION])


ON_DEMAND = custom_layout(is_on_demand=True)


def idle_node(*, label_managed: bool = True) -> node_rig.NodeRig:
    """No pod uses the device that goes."""
    rig = nodes.node(layout="all-balanced", label_managed=label_managed)
    rig.pods.add("spared", devices=frozenset({nodes.device(rig, 1, "3g.20gb")}))
    return rig
