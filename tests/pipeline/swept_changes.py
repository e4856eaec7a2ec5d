"""Changes of the node in memory that tests play again and again, with a fault at any point.

What must hold in the end is written here as data; neither the planner nor the journal is asked.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from mig_manager.agent import outcomes
from mig_manager.core.layout import custom_layouts
from tests.pipeline import custom_requests, repairs
from tests.rigs import layout_table
from tests.rigs.node import agents, node_rig, nodes


class NodeChange(NamedTuple):
    """A request to a node, and how both end if nothing strikes."""

    make: Callable[[], node_rig.NodeRig]
    layout: str
    was: str | None = None  # the layout that is applied before
    custom: custom_layouts.CustomRequest | None = None
    """Where it is this, the GPUs end with ``one-slice-changed``."""
    is_refused: bool = False
    """Whether the driver or a pod prevents it, so that the GPUs end as they were."""
    evicted: frozenset[str] = frozenset()  # the pods that it evicts
    is_repair: bool = False
    """Whether a GPU awaits a reset, which the agent finds once the layout is active."""

    @property
    def before(self) -> layout_table.Gpus:
        return layout_table.gpus_with(self.was or "all-disabled")

    @property
    def after(self) -> layout_table.Gpus:
        """The GPUs once the layout is active."""
        return layout_table.gpus_with("one-slice-changed" if self.custom else self.layout)

    @property
    def other(self) -> "NodeEnd":
        """How a request of another layout ends."""
        layout = "all-balanced" if self.layout == "all-1g.5gb" else "all-1g.5gb"
        return NodeEnd("success", layout, layout_table.gpus_with(layout))

    @property
    def end(self) -> "NodeEnd":
        """How it ends."""
        if self.is_refused:
            return NodeEnd("failed", self.was, self.before)
        return NodeEnd("success", self.layout, self.after)

    def agent(self, rig: node_rig.NodeRig) -> agents.AgentInMemory:
        """Return an agent of the node."""
        return agents.new_agent(rig, settings=custom_requests.ON if self.custom else None)

    def run(
        self, rig: node_rig.NodeRig, by: agents.AgentInMemory | None = None, **options: Any
    ) -> outcomes.Outcome:
        """Apply the layout, with an agent of its own if none is given."""
        agent = by or self.agent(rig)
        return agents.run(rig, self.layout, by=agent, custom=self.custom, **options)

    def calls(self) -> list[str]:
        """Return the port calls of an undisturbed run."""
        rig = self.make()
        assert self.run(rig).state.value == self.end.state
        return rig.log


class NodeEnd(NamedTuple):
    """How a node is at rest."""

    state: str | None
    applied: str | None
    gpus: layout_table.Gpus


def _old_node() -> node_rig.NodeRig:
    rig = nodes.node()
    rig.driver.hides_profiles = True
    return rig


_NOTHING = frozenset[str]()
_BOTH = frozenset({"affected", "spared"})
_balanced = functools.partial(NodeChange, was="all-balanced", evicted=frozenset({"affected"}))
_dra = functools.partial(NodeChange, was="all-1g.5gb", evicted=frozenset({"low", "high"}))


STRUCK_TWICE: Mapping[str, NodeChange] = {
    "first layout": NodeChange(nodes.node, "all-1g.5gb"),
    "first layout, hooks": NodeChange(lambda: nodes.add_hooks(nodes.node()), "all-1g.5gb"),
    "first layout, profiles hidden": NodeChange(_old_node, "all-1g.5gb"),
    "one slice": _balanced(nodes.busy_node, "one-slice-changed"),
    "one slice, services and hooks": _balanced(
        lambda: nodes.add_hooks(nodes.hosted_node()), "one-slice-changed"
    ),
    "mode change": _balanced(nodes.busy_node, "all-disabled-first"),
    "rollback": _balanced(nodes.busy_node, "one-slice-changed", is_refused=True),
    "on demand": _balanced(
        custom_requests.idle_node, "custom", custom=custom_requests.ON_DEMAND, evicted=_NOTHING
    ),
    "whole node": _balanced(nodes.node_with_whole_node_drain, "one-slice-changed", evicted=_BOTH),
    "monitors": _balanced(nodes.monitored_node, "one-slice-changed"),
    "plugin's config": _balanced(nodes.sharing_node, "one-slice-changed"),
    "DRA driver": _dra(nodes.dra_node, "all-disabled"),
    "limited number of nodes": _balanced(nodes.limited_node, "one-slice-changed"),
    "repair": _balanced(repairs.faulty_node, "all-balanced", is_repair=True),
    "repair of a silent GPU": _balanced(repairs.stuck_node, "all-balanced", is_repair=True),
}
"""Changes for tests that play each of them thousands of times."""

CHANGES: Mapping[str, NodeChange] = {
    **STRUCK_TWICE,
    "first layout, plugin without label": NodeChange(
        lambda: nodes.node(label_managed=False), "all-1g.5gb"
    ),
    "first layout, reset": NodeChange(nodes.resetting_node, "all-1g.5gb"),
    "mode off": _balanced(nodes.busy_node, "all-disabled", evicted=_BOTH),
    "by force": _balanced(nodes.guarded_node, "one-slice-changed"),
    "no eviction": _balanced(nodes.node_without_evictions, "one-slice-changed"),
    "starting pod": _balanced(nodes.starting_node, "one-slice-changed"),
    "extra clients": _balanced(nodes.node_with_extra_clients, "one-slice-changed"),
    "services": _balanced(nodes.hosted_node, "one-slice-changed"),
    "DRA driver, another mixed layout": _dra(nodes.dra_node, "all-balanced"),
    "DRA driver without label": _dra(lambda: nodes.dra_node(label_managed=False), "all-balanced"),
    "custom": _balanced(nodes.busy_node, "custom", custom=custom_requests.custom_layout()),
    "custom, devices free": _balanced(
        custom_requests.idle_node,
        "custom",
        custom=custom_requests.custom_layout(),
        evicted=_NOTHING,
    ),
    "on demand, devices in use": _balanced(
        nodes.busy_node,
        "custom",
        custom=custom_requests.ON_DEMAND,
        is_refused=True,
        evicted=_NOTHING,
    ),
}

_SWEPT_BY_DEFAULT = ("first layout", "services", "custom", "on demand")

SWEPT = [
    pytest.param(name, marks=() if name in _SWEPT_BY_DEFAULT else pytest.mark.slow)
    for name, change in CHANGES.items()
    # The calls for one slice are also those with services.
    if name != "one slice" and not (change.is_refused or change.is_repair)
]
"""The changes that succeed, for tests that play each of them dozens of times."""
