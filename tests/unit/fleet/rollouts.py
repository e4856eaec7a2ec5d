"""Nodes in each state of a rollout, and what it decides."""

import dataclasses
from typing import Any

from mig_manager.core.fleet import (
    fleet_nodes,
    goals,
    listed_layouts,
    marks,
    node_progress,
    rollout,
)
from mig_manager.core.layout import layout_documents
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import run_status
from tests.rigs import api_objects
from tests.rigs.node import samples

LAYOUT = "new"

FORMER = "old"

NodeState = node_progress.NodeProgressState

Phase = rollout.RolloutPhase


def a_status(config: str, state: run_status.State, **members: Any) -> run_status.PublishedStatus:
    return run_status.parse(api_objects.a_status(config, state, **members))


HOLD = frozenset({well_known.RECONFIGURING_TAINT})

_VIEW_FIELDS = {field.name for field in dataclasses.fields(node_object.NodeView)} - {"name"}

APPLIED = a_status(FORMER, run_status.State.SUCCESS)


def node(
    name: str = "a",
    *,
    requested: str | None = FORMER,
    state: run_status.State | None = run_status.State.SUCCESS,
    applied: str = FORMER,
    gpus: str = "",
    **changed: Any,
) -> fleet_nodes.FleetNode:
    """Build a node; ``changed`` are fields of it or of its view."""
    labels = {
        well_known.CONFIG_LABEL: requested,
        well_known.STATE_LABEL: state and state.value,
        well_known.APPLIED_LABEL: applied,
    }
    view = samples.node_view(
        name=name,
        labels={key: value for key, value in labels.items() if value},
        annotations={well_known.GPUS_ANNOTATION: gpus} if gpus else {},
        **{key: changed.pop(key) for key in _VIEW_FIELDS & changed.keys()},
    )
    return fleet_nodes.FleetNode(**{"view": view, "is_ready": True, "status": APPLIED, **changed})


def requested_node(name: str = "a", **changed: Any) -> fleet_nodes.FleetNode:
    """A node whose label the rollout wrote, and whose agent has not responded."""
    mark = marks.Mark(layout=LAYOUT, before=FORMER)
    return node(name, **{"requested": LAYOUT, "mark": mark, **changed})


def busy_node(name: str = "a", *, phase: str = "Drain") -> fleet_nodes.FleetNode:
    pending = run_status.State.PENDING
    return requested_node(
        name,
        state=pending,
        taint_keys=HOLD if phase == "Drain" else frozenset(),
        status=a_status(LAYOUT, pending, phase=phase),
    )


def done_node(name: str = "a", **changed: Any) -> fleet_nodes.FleetNode:
    success = a_status(LAYOUT, run_status.State.SUCCESS, reason="Applied")
    return requested_node(name, **{"applied": LAYOUT, "status": success, **changed})


def failed_node(
    name: str = "a", *, is_retried: bool = False, attempt: int = 1
) -> fleet_nodes.FleetNode:
    members = {"retryAt": "2026-01-01T00:00:00Z" if is_retried else None, "attempt": attempt}
    failure = a_status(
        LAYOUT, run_status.State.FAILED, reason="InUse", message="in use", **members
    )
    return requested_node(name, state=run_status.State.FAILED, status=failure)


def rolling(
    most: str = "1",
    *,
    pauses: bool = False,
    document: layout_documents.Document = listed_layouts.NO_FILE,
) -> rollout.Rollout:
    limits = goals.RolloutLimits(
        max_unavailable=most, pauses=pauses, node_timeout_s=100, silence_timeout_s=10
    )
    return rollout.Rollout(goals.RolloutGoal(layout=LAYOUT, document=document), limits)


def decide(*nodes: fleet_nodes.FleetNode, most: str = "1") -> rollout.RolloutDecision:
    return rolling(most).decide(nodes, 0.0)


def states(decision: rollout.RolloutDecision) -> dict[str, NodeState]:
    return {each.name: each.state for each in decision.nodes}
